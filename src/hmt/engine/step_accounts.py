"""What steps have cost since the last reset, by phase and by kind."""

from dataclasses import dataclass, field

from hmt.contracts.step import SchedulerOutput
from hmt.engine.prediction_report import StepTotals
from hmt.engine.run_summary import Phase


@dataclass(slots=True)
class StepAccounts:
    """Sums of the engine's steps.

    prompt, generation   tokens of prompts, and of answers, with their share of time and bytes
    decoded, prefilled   steps that were predicted: those that only decode, and that read prompts
    """

    prompt: Phase = field(default_factory=Phase)
    generation: Phase = field(default_factory=Phase)
    decoded: StepTotals = field(default_factory=StepTotals)
    prefilled: StepTotals = field(default_factory=StepTotals)

    def add(self, step: SchedulerOutput, cost: Phase, wrong: int) -> tuple[int, int]:
        """Count a step, `wrong` of whose tokens were draft tokens that were taken back.

        Returns how many of its other tokens were of prompts, and of answers.
        """
        prompt, tokens = step.prompt_tokens, step.num_tokens - wrong
        # Tokens of one step share its reads and its time.
        self.prompt.add(cost, prompt, tokens)
        self.generation.add(cost, tokens - prompt, tokens)
        if not step.num_drafts:  # no step of these was predicted
            totals = self.prefilled if prompt else self.decoded
            totals.add(step, cost.seconds, cost.disk_bytes)
        return prompt, tokens - prompt

    def add_alone(self, cost: Phase, tokens: int, *, is_prompt: bool) -> None:
        """Count a step that is no request's."""
        (self.prompt if is_prompt else self.generation).add(cost, tokens, tokens)
