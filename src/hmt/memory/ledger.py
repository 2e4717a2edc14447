"""The account of every byte the engine owns, by tier and purpose, with budgets it enforces."""

import threading
from collections.abc import Mapping, Sequence

from hmt.base.errors import BudgetError
from hmt.base.units import format_bytes
from hmt.contracts.plan import Tier


class Ledger:
    """Budgets per tier, handed out as accounts.  Thread-safe.

    An account reserves its whole limit when it is opened, so what was promised to one purpose
    cannot be taken by another, and the sum of all that is used never passes the tier's budget.
    Several devices have a budget each.
    """

    def __init__(self, budgets: Mapping[Tier, int | Sequence[int]]) -> None:
        """A tier's budgets are one for each memory of its kind: those of devices by index."""
        self._budgets = {
            tier: (given,) if isinstance(given, int) else tuple(given)
            for tier, given in budgets.items()
        }
        self._accounts: dict[Tier, list[Account]] = {tier: [] for tier in self._budgets}
        self._lock = threading.Lock()

    def open(self, tier: Tier, purpose: str, limit_bytes: int, device: int = 0) -> "Account":
        """Reserve `limit_bytes` of `tier` for `purpose`.  Raises BudgetError if it is too much.

        device   which one's, where the tier has several
        """
        with self._lock:
            budget = self._budget(tier, device)
            free = budget - self._reserved(tier, device)
            if limit_bytes > free:
                raise BudgetError(
                    f"{purpose} needs {format_bytes(limit_bytes)} of {tier} memory, and "
                    f"{format_bytes(free)} of the budget of {format_bytes(budget)} is left; raise "
                    "the budget"
                )
            account = Account(self, tier, purpose, limit_bytes, device)
            self._accounts[tier].append(account)
            return account

    def reserved_bytes(self, tier: Tier) -> int:
        """Bytes promised to open accounts of `tier`."""
        with self._lock:
            return sum(account.limit_bytes for account in self._accounts.get(tier, []))

    def left_bytes(self, tier: Tier) -> tuple[int, ...]:
        """Of each budget of `tier`, what no account has."""
        with self._lock:
            budgets = self._budgets.get(tier, ())
            return tuple(
                budget - self._reserved(tier, device) for device, budget in enumerate(budgets)
            )

    def used_bytes(self, tier: Tier) -> int:
        """Bytes that open accounts of `tier` use now."""
        with self._lock:
            return sum(account.used_bytes for account in self._accounts.get(tier, []))

    def budget_bytes(self, tier: Tier) -> int:
        """The tier's budgets together."""
        return sum(self._budgets.get(tier, ()))

    def _budget(self, tier: Tier, device: int) -> int:
        budgets = self._budgets.get(tier, ())
        return budgets[device] if device < len(budgets) else 0

    def _reserved(self, tier: Tier, device: int) -> int:
        return sum(
            account.limit_bytes
            for account in self._accounts.get(tier, [])
            if account.device == device
        )

    def _close(self, account: "Account") -> None:
        with self._lock:
            self._accounts[account.tier].remove(account)


class Account:
    """One purpose's share of a tier.  Thread-safe; made by `Ledger.open`."""

    def __init__(
        self, ledger: Ledger, tier: Tier, purpose: str, limit_bytes: int, device: int
    ) -> None:
        self.tier = tier
        self.device = device
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
