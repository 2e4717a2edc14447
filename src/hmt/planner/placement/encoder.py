"""What an encoder of images gets: slots for its parts on a device, and room for its work.

On a device it gets a part where the attention of all layers and the head fit beside it.  Its parts
come when an image does; until then nothing of it is on the device, though the slots are counted.
While an image is encoded no layer computes: the work shares the activations' room, which is made
larger where an image needs more.
"""

from hmt.base.units import format_bytes, round_up
from hmt.contracts.plan import Plan
from hmt.planner.cost.demand import Demand

_ALIGNMENT = 256
_PASSING = 2  # slots of parts that do not stay: one is copied while another computes


def image_bytes(demand: Demand, spare: int, *, on_host: bool) -> int:
    """Host memory for images and the work of encoding one, of `spare` bytes.

    Up to an eighth of these; a quarter where an image of 1024 x 1024 pixels takes that on the host.
    For one Qwen2.5-VL-7B takes 0.6 GiB there.
    """
    usual = min(demand.encoding_bytes[0], spare // 4) if on_host else 0
    return min(demand.image_bytes, max(spare // 8, usual))


def least_encoder_bytes(demand: Demand, activations: int) -> tuple[int, int]:
    """Slots with which a device can encode images, and room that `activations` lack for the work.

    (0, 0) for a model that sees none.
    """
    largest = round_up(demand.vision_slot_bytes, _ALIGNMENT)
    slots = min(_PASSING * largest, _most_slot_bytes(demand))
    return slots, max(0, demand.encoding_bytes[0] - activations) if slots else 0


def with_spare(demand: Demand, slots: int, activations: int, spare: int) -> tuple[int, int]:
    """Bytes of slots and of activations, where nothing else wants `spare` bytes.

    First all parts shall stay, and then the largest image be encoded there.
    """
    if not slots:
        return 0, activations
    wanted = min(slots + max(0, spare), _most_slot_bytes(demand))
    left = max(0, spare - (wanted - slots))
    return wanted, min(activations + left, max(activations, demand.encoding_bytes[1]))


def encoder_remark(plan: Plan, demand: Demand) -> str:
    """Why a GPU that computes layers does not encode images, for people; "" where it does.

    Or where there is no GPU, or nothing to encode with.
    """
    if not demand.vision or not plan.device.stages or "encoder" in plan.device.reserved:
        return ""
    slots, work = least_encoder_bytes(demand, 0)
    return (
        "images are encoded on the CPU: beside the attention of all layers and the output layer "
        f"the GPU's budget has no room for {format_bytes(slots)} of the encoder's parts and "
        f"{format_bytes(work)} of work for an image of 1024 x 1024 pixels"
    )


def _most_slot_bytes(demand: Demand) -> int:
    """Slots in which all parts stay."""
    return sum(round_up(block.slot_bytes, _ALIGNMENT) for block in demand.vision)
