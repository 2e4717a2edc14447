"""The account of every byte the engine owns, by tier and purpose, with budgets it enforces."""

import threading
from collections.abc import Mapping

from hmt.base.errors import BudgetError
from hmt.base.units import format_bytes
from hmt.contracts.plan import Tier


class Ledger:
    """Budgets per tier, handed out as accounts.  Thread-safe.

    An account reserves its whole limit when it is opened, so what was promised to one purpose
    cannot be taken by another, and the sum of all that is used never passes the tier's budget.
    """

    def __init__(self, budgets: Mapping[Tier, int]) -> None:
        self._budgets = dict(budgets)
        self._accounts: dict[Tier, list[Account]] = {tier: [] for tier in self._budgets}
        self._lock = threading.Lock()

    def open(self, tier: Tier, purpose: str, limit_bytes: int) -> "Account":
        """Reserve `limit_bytes` of `tier` for `purpose`.  Raises BudgetError if it is too much."""
        with self._lock:
            free = self._budgets.get(tier, 0) - self._reserved(tier)
            if limit_bytes > free:
                raise BudgetError(
                    f"{purpose} needs {format_bytes(limit_bytes)} of {tier} memory, and "
                    f"{format_bytes(free)} of the budget of "
                    f"{format_bytes(self._budgets.get(tier, 0))} is left; raise the budget"
                )
            account = Account(self, tier, purpose, limit_bytes)
            self._accounts[tier].append(account)
            return account

    def reserved_bytes(self, tier: Tier) -> int:
        """Bytes promised to open accounts of `tier`."""
        with self._lock:
            return self._reserved(tier)

    def used_bytes(self, tier: Tier) -> int:
        """Bytes that open accounts of `tier` use now."""
        with self._lock:
            return sum(account.used_bytes for account in self._accounts.get(tier, []))

    def budget_bytes(self, tier: Tier) -> int:
        """The tier's budget."""
        return self._budgets.get(tier, 0)

    def _reserved(self, tier: Tier) -> int:
        return sum(account.limit_bytes for account in self._accounts.get(tier, []))

    def _close(self, account: "Account") -> None:
        with self._lock:
            self._accounts[account.tier].remove(account)


class Account:
    """One purpose's share of a tier.  Thread-safe; made by `Ledger.open`."""

    def __init__(self, ledger: Ledger, tier: Tier, purpose: str, limit_bytes: int) -> None:
        self.tier = tier
        self.purpose = purpose
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._ledger = ledger
        self._lock = threading.Lock()

    def try_charge(self, nbytes: int) -> bool:
        """Take `nbytes` if the limit allows it."""
        with self._lock:
            if self.used_bytes + nbytes > self.limit_bytes:
                return False
            self.used_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return True

    def charge(self, nbytes: int) -> None:
        """Take `nbytes`.  Raises BudgetError when the limit does not allow it."""
        if not self.try_charge(nbytes):
            raise BudgetError(
                f"{self.purpose} asked for {format_bytes(nbytes)} more of {self.tier} memory, but "
                f"{format_bytes(self.used_bytes)} of its {format_bytes(self.limit_bytes)} are used"
            )

    def release(self, nbytes: int) -> None:
        """Give back `nbytes` that were charged."""
        with self._lock:
            assert 0 <= nbytes <= self.used_bytes, (self.purpose, nbytes, self.used_bytes)
            self.used_bytes -= nbytes

    def close(self) -> None:
        """End the reservation.  Everything must have been released."""
        assert self.used_bytes == 0, f"{self.purpose} still holds {self.used_bytes} bytes"
        self._ledger._close(self)
