"""What a plan costs: seconds and bytes of a step, from sums of bytes and a machine's rates.

A layer waits for the one before it, and within a layer what the GPU does for attention and what
the CPU does for a network follow each other: their times add up.  A layer's experts are shared
out, and each share computes at once: the longest counts.  Blocks that are known in advance are
copied or read ahead, through the whole step: there the link, or the drive, bounds the step as a
whole.  So

    step = max(sum over layers of (GPU + CPU + max of experts' shares + handing over),
               link's bytes / rate, drive's bytes / rate) + the step's own overhead

Link and CPU read the same memory: while both are busy each has the rate that was measured for both
at once.  A rate that is not known costs nothing; but without the rates of memory, and of the drive
where it is read, nothing is predicted, and of prompts nothing without those of arithmetic.
"""

from hmt.contracts.machine import Machine
from hmt.contracts.plan import Tier
from hmt.planner.attention_costs import (
    AttentionWork,
    attention_work,
    cpu_operations,
    cpu_seconds,
    device_operations,
    device_seconds,
    over,
)
from hmt.planner.caches import Caches
from hmt.planner.loads import Experts, LayerLoad, Loads, Sums, Weights
from hmt.planner.predicted import Prediction, StepCost
from hmt.planner.products import Products, Times, times_in_layers
from hmt.planner.routing import ASKED_AHEAD, Needed, needed_experts, working_set
from hmt.planner.step_sums import StepSums

_MANY_TOKENS = 32  # of a step in which a device computes as with prompts
_SEVERAL = 8  # users from whom on a device's attention is not faster with more of them
# Of experts that are read, how many more are read on a guess that was wrong: 6 to 16% of a model of
# 32, where guesses came true in 4 to 6 of 10 cases.  They take what time of the drive is left.
_WRONG_GUESSES = 0.1
_LEAST_SHARE = 0.5  # of memory's rate that is left to the CPU while the link reads, if not measured


class CostModel:
    """Costs of one plan's loads on one machine."""

    def __init__(self, loads: Loads, machine: Machine, *, drawn: bool = False) -> None:
        """What steps of `loads` cost on `machine`.

        drawn   whether tokens are drawn by chance, and not always the likeliest ones
        """
        self._loads, self._drawn = loads, drawn
        self._machine = machine
        self._caches = Caches(machine)

    def predict(self, users: int, context: int, prompt_tokens: int = 0) -> Prediction:
        """Decoding for `users` with `context` positions each, after a prompt."""
        step = self.decode(users, context)
        prompt, ttft = StepCost(), 0.0
        if prompt_tokens:
            chunk = min(self._loads.chunk, prompt_tokens)
            before, last = divmod(prompt_tokens - 1, chunk)
            prompt = self.prompt(chunk, prompt_tokens / 2)
            ttft = self.prompt(last + 1, prompt_tokens - last / 2).seconds
            if before and prompt.seconds:
                # Only behind the last piece the head has something to do.
                seen = before * chunk / 2
                ttft += before * self.prompt(chunk, seen, last=False).seconds
        rate = users / step.seconds if step.seconds else 0.0
        return Prediction(users, context, prompt_tokens, step, prompt, rate, ttft)

    def decode(self, users: int, context: float) -> StepCost:
        """One token for each of `users`, who have `context` positions each."""
        return self._step(users, users, context, False)

    def prompt(self, tokens: int, context: float, *, last: bool = True) -> StepCost:
        """A chunk of one prompt, whose tokens attend to `context` positions on average.

        Behind the `last` one the first token of the answer is chosen.
        """
        return self._step(tokens, 1, context, True, head=last)

    def mixed(self, tokens: int, texts: int, context: float, seen: float) -> StepCost:
        """Pieces of prompts, and one token of each text that decodes: `tokens` of `texts` in all.

        context   positions of each text on average, which are read
        seen      positions that each token attends to on average
        """
        return self._step(tokens, texts, context, tokens >= _MANY_TOKENS, seen)

    def _step(
        self,
        tokens: int,
        texts: int,
        context: float,
        many: bool,
        seen: float | None = None,
        head: bool = True,
    ) -> StepCost:
        given = self._loads, self._machine, tokens, texts, context, many, seen
        how = self._caches, head, self._drawn
        step = _Step(*given)
        found = step.cost(*how)
        # What a step reads of the CPU's memory it reads again in the next one.
        faster = self._caches.faster(found.nbytes["CPU"] + step.other_experts_bytes)
        if faster == 1.0:
            return found
        return _Step(*given, faster, self._caches.from_memory(faster)).cost(*how)


class _Step:
    """Adds up one step."""

    def __init__(
        self,
        loads: Loads,
        machine: Machine,
        tokens: int,
        texts: int,
        context: float,
        many: bool,
        seen: float | None = None,
        faster: float = 1.0,
        from_memory: float = 1.0,
    ) -> None:
        """`faster`: so many times is the CPU's memory read, since caches hold it; see Caches."""
        self._loads, self._machine = loads, machine
        self._tokens, self._texts, self._context, self._many = tokens, texts, context, many
        self._seen = context if seen is None else seen
        self._faster = faster
        self._from_memory = from_memory if machine.cpu_in_layers and not many else 0.0
        self._cpu = Products(
            machine.cpu_rates, self._ram_rate(), machine.cpu_ops, machine.cpu_row_s,
            faster, machine.cpu_cached_rates, machine.cpu_cached_row_s,
        )  # fmt: skip
        self._gpu = Products(machine.device_rates, machine.device_read_rate, machine.device_ops)
        self._gpu_s = self._cpu_s = self._fixed_s = self._calls_s = 0.0
        self._experts_s = {"GPU": 0.0, "CPU": 0.0, "link": 0.0, "disk": 0.0}
        self._in_layers_s = self._launch_s = 0.0
        self._longest: dict[str, float] = {}
        self._bytes = {"GPU": 0.0, "CPU": 0.0, "link": 0.0, "disk": 0.0}
        self._ahead = {"link": 0.0, "disk": 0.0}  # bytes
        self._unknown = False
        self.other_experts_bytes = 0.0  # that the CPU does not read now, but often
        self._cpu_bytes: dict[str, float] = {}  # by encoding

    def cost(self, caches: Caches, head: bool = True, drawn: bool = False) -> StepCost:
        before = False  # whether the layer before ended on the device
        # Drafts share what layers do that are alike: searches take a fourth of the time.
        alike: dict[tuple[int, bool], tuple[LayerLoad, int]] = {}
        for load in self._loads.layers:
            place = id(load), before
            alike[place] = load, 1 + (alike[place][1] if place in alike else 0)
            before = load.attends_on_device
        for (_, after_device), (load, times) in alike.items():
            begin = self._so_far() if times > 1 else None
            self._layer(load, after_device)
            if begin is not None:
                self._add(begin.until(self._so_far()), times - 1)
        if head:
            self._head(before)
        if self._loads.row_bytes:
            self._calls_s += self._machine.lookup_s
            self._ahead["disk"] += self._tokens * self._loads.row_bytes
            self._bytes["disk"] += self._tokens * self._loads.row_bytes
        step_s, rows_s = self._host_s(head, drawn)
        if not (self._many and self._machine.piece_s):  # prompts leave nothing in caches anyway
            step_s *= caches.slower(self._bytes["CPU"])
        # Rows are looked at while the next kernels run, and layers that are called one by one call
        # the same: what steps leave in caches is no matter.
        return self._sum(self._calls_s + step_s + rows_s, self._begins_early(drawn))

    def _so_far(self) -> StepSums:
        parts = (self._experts_s, self._longest, self._bytes, self._ahead, self._cpu_bytes)
        times = (self._gpu_s, self._cpu_s, self._fixed_s, self._calls_s, self._in_layers_s)
        sums = (*times, self._launch_s, self.other_experts_bytes)
        return StepSums(sums, tuple(dict(part) for part in parts))

    def _add(self, sums: StepSums, times: int) -> None:
        """What so many other layers add that are like one before."""
        gpu_s, cpu_s, fixed_s, calls_s, in_layers_s, launch_s, others_bytes = sums.sums
        self._gpu_s += times * gpu_s
        self._cpu_s += times * cpu_s
        self._fixed_s += times * fixed_s
        self._calls_s += times * calls_s
        self._in_layers_s += times * in_layers_s
        self._launch_s += times * launch_s
        self.other_experts_bytes += times * others_bytes
        parts = (self._experts_s, self._longest, self._bytes, self._ahead, self._cpu_bytes)
        for part, more in zip(parts, sums.parts, strict=True):
            for name, amount in more.items():
                part[name] += times * amount

    def _layer(self, load: LayerLoad, before: bool) -> None:
        machine = self._machine
        on_device = load.attends_on_device
        handed = int(on_device != before)
        gpu_s, cpu_s = self._gpu_s, self._cpu_s
        self._dense(load.many if self._many else load.few, self._tokens)
        self._attention(load)
        left = self._experts(load, load.experts) if load.experts is not None else 0.0
        cpu = self._cpu_s > cpu_s or left > 0
        if on_device and cpu:
            handed += 2
        numbers = self._tokens * self._loads.width
        if on_device or self._gpu_s > gpu_s:
            self._launched(load)
            self._gpu_s += numbers * machine.device_number_s
        if cpu:
            prompts = self._many and machine.piece_s  # were measured
            layer_s = machine.layer_s * (1.0 - self._from_memory)
            self._fixed_s += machine.prompt_layer_s if prompts else layer_s
            self._calls_s += self._apart_s(load)
            self._cpu_s += numbers * machine.number_s
        if left and self._many:
            self._calls_s += machine.prompt_experts_s
            self._cpu_s += numbers * self._loads.chosen * machine.expert_number_s
        self._fixed_s += handed * machine.sync_s if machine.device_name else 0.0

    def _launched(self, load: LayerLoad) -> None:
        """Of a layer on the device: few tokens' steps are captured, others launched in pieces."""
        machine, kind = self._machine, " experts" if load.experts is not None else ""
        if self._many and machine.device_launches:
            launches = Times(machine.device_launches, kind)
            self._launch_s += launches.seconds(load.encoding(many=True), 1)
        elif self._many:
            self._fixed_s += machine.prompt_launch_s or machine.launch_s
        elif machine.device_layers:
            self._gpu_s += Times(machine.device_layers, kind).seconds(load.encoding(), self._tokens)
        else:
            self._fixed_s += machine.launch_s

    def _apart_s(self, load: LayerLoad) -> float:
        """What a layer takes that is computed one by one; those of prompts all are."""
        machine = self._machine
        if not self._loads.apart:
            return 0.0
        layer_s = 0.0 if self._many else machine.apart_layer_s
        held = load.experts is not None and load.experts.home is Tier.DISK
        experts_s = machine.held_experts_s if held else machine.apart_experts_s
        rows_s = (self._texts - 1) * machine.apart_latent_row_s
        latent_s = machine.apart_latent_s + rows_s if load.latent else 0.0
        if load.latent and self._many:
            numbers = self._tokens * load.expanded_operations / 2
            latent_s = machine.prompt_latent_s + numbers * machine.latent_number_s
        return layer_s + latent_s + (experts_s if load.experts else 0.0)

    def _dense(self, sums: Sums, tokens: int) -> None:
        for (place, encoding), weights in sums.items():
            if place.on_device:
                self._gpu_s += self._gpu_time(weights, encoding, tokens)
                self._bytes["GPU"] += weights.nbytes
            else:
                self._cpu_s += self._cpu_time(weights, encoding, tokens)
                self._bytes["CPU"] += weights.nbytes
                so_far = self._cpu_bytes.get(encoding, 0.0)
                self._cpu_bytes[encoding] = so_far + weights.nbytes
            if place.copied:
                self._ahead["link"] += weights.nbytes
                self._bytes["link"] += weights.nbytes
                self._launch_s += weights.blocks * self._machine.bring_s if self._many else 0.0
            if place.read:
                alone_s = (1 - self._loads.overlap.hidden) * self._machine.read_alone_s
                self._calls_s += weights.blocks * (self._machine.read_block_s + alone_s)
                self._ahead["disk"] += weights.read_bytes
                self._bytes["disk"] += weights.read_bytes

    def _attention(self, load: LayerLoad) -> None:
        """Of this step's tokens to the positions before them, at the levels where these lie."""
        loads, machine = self._loads, self._machine
        work = attention_work(load, self._tokens, self._texts, self._context, self._seen)
        on_device = load.attends_on_device
        near, host = loads.near, loads.warm + loads.cold
        if load.window or not on_device:
            near, host = (1.0, 0.0) if load.window else (loads.near + loads.warm, loads.cold)
        rate = self._device_attention_rate() or machine.device_read_rate
        # The CPU attends to what is in host memory, beside the device.
        on_cpu = self._cpu_attention_s(load, work.times(host))
        self._bytes["GPU" if on_device else "CPU"] += near * work.nbytes
        self._bytes["CPU"] += host * work.nbytes
        if on_device:
            near_s = device_seconds(machine, work.times(near), rate)
            self._gpu_s += near_s
            self._cpu_s += max(0.0, on_cpu - near_s)  # at once
        else:
            self._cpu_s += self._cpu_attention_s(load, work.times(near)) + on_cpu
        # A prompt is arithmetic.
        shares = ((near, on_device), (host, False))
        for share, there in shares:
            known = device_operations(machine) if there else cpu_operations(machine)
            self._unknown |= self._many and bool(share * work.operations) and not known
        cold = 0.0 if load.window else loads.cold * loads.cold_ratio * work.nbytes
        self._ahead["disk"] += cold
        self._bytes["disk"] += cold

    def _cpu_attention_s(self, load: LayerLoad, work: AttentionWork) -> float:
        return cpu_seconds(self._machine, load, work, self._ram_rate(), self._faster)

    def _device_attention_rate(self) -> float:
        """One user's positions keep only a part of a device busy."""
        one = self._machine.device_attention_rate
        more = max(one, self._machine.device_attention_several)
        return one + (more - one) * min(1.0, (self._texts - 1) / (_SEVERAL - 1))

    def _experts(self, load: LayerLoad, experts: Experts) -> float:
        """Experts that the CPU computes."""
        chosen, count, each = self._loads.chosen, experts.count, experts.each
        # Steps of many tokens bring all in turn that are not cached, whichever they need.
        in_turn = self._many and load.many_experts_on_device and experts.home is not Tier.DEVICE
        there = experts.on_device
        needed = Needed(there, count - there) if in_turn else self._needed(count, there)
        read = 0.0
        if experts.home is Tier.DISK:
            kept = max(experts.in_memory, experts.on_device)
            read = self._needed(count, kept).absent
        self._calls_s += read * self._machine.missed_expert_s
        brought = 0.0
        if self._many and load.many_experts_on_device:
            brought = needed.absent
            self._launch_s += brought * self._machine.bring_s
        elif experts.brought:
            brought = min(needed.absent * self._loads.link_share, experts.brought)
        left = needed.absent - brought
        here = needed.cached + brought
        # Each token multiplies with those it has chosen, however many share one.
        uses = self._tokens * chosen / max(1e-9, needed.cached + needed.absent)
        seconds = {
            "GPU": self._gpu_time(each.times(here), experts.encoding, uses),
            "CPU": self._cpu_time(each.times(left), experts.encoding, uses),
            "link": over(brought * each.nbytes, self._machine.link_rate),
            "disk": self._disk_time(read * each.read_bytes),
        }
        reading_s = self._cpu.reading_s(left * each.nbytes, experts.encoding)
        seconds["CPU"], seconds["link"] = self._beside(
            seconds["CPU"], reading_s, seconds["link"], experts.encoding
        )
        for name, taken in seconds.items():
            self._experts_s[name] += taken
        # In steps of many tokens most experts are wanted: the link goes ahead of the layers.
        if self._many:
            ahead = {"link": brought * each.nbytes, "disk": read * each.read_bytes}
            for name, nbytes in ahead.items():
                self._ahead[name] += nbytes
                self._experts_s[name] -= seconds[name]
            computing_s = max(seconds["GPU"], seconds["CPU"])
            used = (needed.cached + needed.absent) / count
            waited_s = self._first_s(used, seconds["disk"], computing_s)
            self._in_layers_s += computing_s + waited_s
            self._longest["disk"] = self._longest.get("disk", 0.0) + waited_s
        else:
            # What the drive brings is waited for behind what is there: with a third of a layer's
            # experts missing, two cores computed and waited in turn.
            disk_s = seconds.pop("disk")
            longest = max(seconds, key=lambda name: seconds[name])
            self._in_layers_s += seconds[longest] + disk_s
            for name, taken in ((longest, seconds[longest]), ("disk", disk_s)):
                self._longest[name] = self._longest.get(name, 0.0) + taken
        self._bytes["GPU"] += here * each.nbytes
        self._bytes["CPU"] += left * each.nbytes
        often = working_set(self._loads.hits, self._texts) * (count - experts.on_device)
        self.other_experts_bytes += max(0.0, often - left) * each.nbytes
        self._bytes["link"] += brought * each.nbytes
        guessed = _WRONG_GUESSES * read if self._loads.guesses and not self._many else 0.0
        self._bytes["disk"] += (read + guessed) * each.read_bytes
        return left

    def _first_s(self, used: float, disk_s: float, computing_s: float) -> float:
        """What a layer waits for of its experts, in a step of many tokens.

        Where it has `used` nearly all of them they are asked for ahead of it.  Else the first one
        comes when all has that was asked for with it, and the others while it computes.
        """
        if used >= ASKED_AHEAD:
            return 0.0
        first_s = min(disk_s, self._disk_time(self._machine.disk_flight_bytes))
        return max(first_s, disk_s - computing_s)

    def _needed(self, count: int, cached: float) -> Needed:
        """Of `count` experts of a layer, `cached` of which are near."""
        return needed_experts(
            count, self._loads.chosen, self._tokens, cached, self._loads.hits, self._texts
        )

    def _head(self, before: bool) -> None:
        rows = self._texts
        self._dense(self._loads.head.few, rows)
        on_device = any(place.on_device for place, _ in self._loads.head.few)
        if self._machine.device_name and on_device != before:
            self._fixed_s += self._machine.sync_s

    def _host_s(self, head: bool, drawn: bool) -> tuple[float, float]:
        """What the CPU does for a step, whatever that computes: once, and for its users."""
        machine, rows = self._machine, self._texts
        drawn_s = rows * machine.logit_s * self._loads.vocabulary if head and drawn else 0.0
        if self._many and (machine.prompt_s or machine.piece_s):
            # A request comes and goes once, whatever pieces its prompt is read in.
            step_s = (head and machine.prompt_s) or machine.piece_s or machine.step_s
            row_s, rows = 0.0 if machine.device_name else machine.row_s, rows - 1
        elif self._begins_early(drawn) or not machine.draw_s:
            step_s, row_s = machine.step_s, machine.row_s
        else:
            step_s, row_s = machine.draw_s, machine.draw_row_s
        return step_s + drawn_s, rows * row_s

    def _begins_early(self, drawn: bool) -> bool:
        """Whether a device computes the next step while the CPU looks at this one."""
        alone = not self._cpu_s and not self._experts_s["CPU"] and not self._experts_s["link"]
        on_device = all(load.attends_on_device for load in self._loads.layers)
        return bool(self._machine.draw_s) and on_device and alone and not (self._many or drawn)

    def _sum(self, host_s: float, begins_early: bool) -> StepCost:
        machine = self._machine
        link_s = over(self._ahead["link"], machine.link_rate)
        disk_s = self._disk_time(self._ahead["disk"])
        cpu_s = self._cpu_s
        usual = max(self._cpu_bytes, key=lambda name: self._cpu_bytes[name], default="")
        reading_s = sum(
            self._cpu.reading_s(nbytes, name) for name, nbytes in self._cpu_bytes.items()
        )
        cpu_s, link_s = self._beside(cpu_s, reading_s, link_s, usual)
        link_s += self._experts_s["link"]
        disk_s += self._experts_s["disk"]
        if self._gpu_s and not self._many:
            self._gpu_s += machine.device_step_s
        fixed = self._fixed_s + host_s + self._launch_s
        computing_s = self._gpu_s + self._in_layers_s
        # While a device computes, the CPU launches what comes behind it, or has what came before.
        at_once = min(computing_s, fixed if begins_early else self._launch_s)
        in_turn = computing_s + cpu_s + fixed - at_once
        # What the drive cannot bring while layers compute, it brings before.
        seconds = max(in_turn, link_s, disk_s)
        seconds += self._loads.overlap.waited_s(in_turn, disk_s, many=self._many)
        busy = {
            "GPU": self._gpu_s + self._experts_s["GPU"],
            "CPU": cpu_s + self._experts_s["CPU"],
            "link": link_s,
            "disk": disk_s,
            "handing over": fixed,
        }
        waits = {"GPU": self._gpu_s, "CPU": cpu_s, "handing over": fixed}
        waits["GPU" if fixed > computing_s else "handing over"] -= at_once
        for name, taken in self._longest.items():
            waits[name] = waits.get(name, 0.0) + taken
        if seconds > in_turn:
            limit = "link" if link_s >= disk_s else "disk"
        else:
            limit = max(waits, key=lambda name: waits[name])
        unknown = self._unknown or not machine.ram_read_rate
        return StepCost(0.0 if unknown else seconds, busy, self._bytes, limit)

    def _gpu_time(self, weights: Weights, encoding: str, tokens: float) -> float:
        return self._product(self._gpu, weights, encoding, tokens)

    def _cpu_time(self, weights: Weights, encoding: str, tokens: float) -> float:
        seconds = self._product(self._cpu, weights, encoding, tokens)
        if not self._from_memory:
            return seconds
        times = times_in_layers(self._machine.cpu_in_layers, encoding, tokens)
        return seconds * (1.0 + (times - 1.0) * self._from_memory)

    def _product(self, side: Products, weights: Weights, encoding: str, tokens: float) -> float:
        if self._many and weights.numbers and not side.known:
            self._unknown = True  # a prompt is arithmetic
        return side.seconds(weights.nbytes, weights.numbers, encoding, tokens, weights.rows)

    def _disk_time(self, nbytes: float) -> float:
        if nbytes and not self._machine.disk_read_rate:
            self._unknown = True
        return over(nbytes, self._machine.disk_read_rate)

    def _ram_rate(self) -> float:
        """Of memory that is spread over all nodes."""
        machine = self._machine
        others = (machine.numa_nodes - 1) * machine.remote_share
        return machine.ram_read_rate * (1 + others) / machine.numa_nodes

    def _beside(
        self, cpu_s: float, reading_s: float, link_s: float, encoding: str
    ) -> tuple[float, float]:
        """Seconds of both where they begin together: slower until one ends, then as alone.

        Of the CPU's only `reading_s` get longer, which may hide behind its arithmetic.
        """
        if not reading_s or not link_s:
            return cpu_s, link_s
        cpu_share, link_share = self._at_once(encoding)
        both = min(reading_s / cpu_share, link_s / link_share)
        return max(cpu_s, reading_s + both * (1 - cpu_share)), link_s + both * (1 - link_share)

    def _at_once(self, encoding: str) -> tuple[float, float]:
        """Shares of their own rates that CPU and link have while both are busy."""
        machine, memory = self._machine, self._ram_rate()
        alone = self._cpu.rate(encoding)
        shared = machine.shared_cpu_rate or max(_LEAST_SHARE * memory, memory - machine.link_rate)
        link = machine.shared_link_rate / machine.link_rate if machine.shared_link_rate else 1.0
        return min(1.0, shared / alone) if alone else 1.0, min(1.0, link) or 1.0
