"""The ledger against a plain model of it: budgets are never passed, nothing leaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hmt.base.errors import BudgetError
from hmt.contracts.plan import Tier
from hmt.memory import Account, Ledger

BUDGET = 1 << 20


class LedgerMachine(RuleBasedStateMachine):
    """Accounts are opened, charged, released and closed in any order."""

    accounts = Bundle("accounts")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger({Tier.HOST: BUDGET})
        self.used: dict[Account, int] = {}

    @rule(target=accounts, limit=st.integers(0, BUDGET))
    def open(self, limit: int) -> Account | None:
        reserved = sum(account.limit_bytes for account in self.used)
        if reserved + limit > BUDGET:
            with pytest.raises(BudgetError):
                self.ledger.open(Tier.HOST, "test", limit)
            return None
        account = self.ledger.open(Tier.HOST, "test", limit)
        self.used[account] = 0
        return account

    @rule(account=accounts, nbytes=st.integers(0, BUDGET))
    def charge(self, account: Account | None, nbytes: int) -> None:
        if account in self.used:
            fits = self.used[account] + nbytes <= account.limit_bytes
            assert account.try_charge(nbytes) == fits
            self.used[account] += nbytes if fits else 0

    @rule(account=accounts, share=st.floats(0, 1))
    def release(self, account: Account | None, share: float) -> None:
        if account in self.used:
            nbytes = int(self.used[account] * share)
            account.release(nbytes)
            self.used[account] -= nbytes

    @rule(account=consumes(accounts))
    def close(self, account: Account | None) -> None:
        if account in self.used:
            account.release(self.used.pop(account))
            account.close()

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.ledger.used_bytes(Tier.HOST) == sum(self.used.values()) <= BUDGET
        assert self.ledger.reserved_bytes(Tier.HOST) <= BUDGET


TestLedger = LedgerMachine.TestCase


@given(st.integers(1, BUDGET))
def test_an_account_over_the_budget_says_what_is_left(extra: int) -> None:
    ledger = Ledger({Tier.HOST: BUDGET})
    with pytest.raises(BudgetError, match="is left"):
        ledger.open(Tier.HOST, "weights", BUDGET + extra)


def test_a_tier_without_budget_has_none() -> None:
    with pytest.raises(BudgetError):
        Ledger({Tier.HOST: BUDGET}).open(Tier.DEVICE, "weights", 1)


def test_each_device_has_a_budget_of_its_own() -> None:
    ledger = Ledger({Tier.HOST: BUDGET, Tier.DEVICE: (100, 200)})
    account = ledger.open(Tier.DEVICE, "weights", 150, device=1)
    assert ledger.budget_bytes(Tier.DEVICE) == 300 and ledger.left_bytes(Tier.DEVICE) == (100, 50)
    for device, nbytes in ((0, 101), (1, 51), (2, 1)):
        with pytest.raises(BudgetError):
            ledger.open(Tier.DEVICE, "kv", nbytes, device=device)
    account.close()
    assert ledger.left_bytes(Tier.DEVICE) == (100, 200) and not ledger.reserved_bytes(Tier.DEVICE)
