import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_bucketddp.layout.plan import (
    ALIGNMENT_BYTES,
    MAX_DEFAULT_BUCKET_BYTES,
    MIB,
    ParamSpec,
    default_bucket_cap,
    plan,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def spec(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> ParamSpec:
    return ParamSpec(name, shape, torch.empty(shape, device="meta").stride(), dtype, device)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[ParamSpec], list[int], int | None, list[int]]:
    count = draw(st.integers(1, 25))
    specs = [
        spec(
            f"p{i}",
            tuple(draw(st.lists(st.integers(0, 60), max_size=3))),
            draw(st.sampled_from(DTYPES)),
            draw(st.sampled_from(["cuda:0", "cuda:1"])),
        )
        for i in range(count)
    ]
    order = draw(st.permutations(range(count)))
    cap = draw(st.one_of(st.none(), st.integers(1, 4000)))
    groups = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    return specs, order, cap, groups


@given(problems())
def test_slots_are_disjoint_aligned_and_inside_their_bucket(
    problem: tuple[list[ParamSpec], list[int], int | None, list[int]],
) -> None:
    specs, order, cap, groups = problem
    layout = plan(specs, order, cap, groups)
    assert [slot.spec for slot in layout.slots] == specs
    for bucket in layout.buckets:
        end = bucket.start
        for index in bucket.slots:
            slot = layout.slots[index]
            assert slot.buffer == bucket.buffer
            assert slot.offset >= end
            assert slot.offset * slot.spec.dtype.itemsize % ALIGNMENT_BYTES == 0
            end = slot.offset + slot.spec.numel
        assert end <= bucket.stop
    for slot in layout.slots:
        buffer = layout.buffers[slot.buffer]
        assert (buffer.dtype, buffer.device) == (slot.spec.dtype, slot.spec.device)


@given(problems())
def test_every_slot_is_in_one_bucket_and_buckets_tile_their_buffer(
    problem: tuple[list[ParamSpec], list[int], int | None, list[int]],
) -> None:
    layout = plan(*problem)
    assert sorted(slot for bucket in layout.buckets for slot in bucket.slots) == list(range(len(layout.slots)))
    for index, buffer in enumerate(layout.buffers):
        position = 0
        for bucket in sorted((it for it in layout.buckets if it.buffer == index), key=lambda it: it.start):
            assert bucket.start == position
            position = bucket.stop
        assert position == buffer.numel


@given(problems())
def test_buckets_respect_the_cap_and_the_groups(
    problem: tuple[list[ParamSpec], list[int], int | None, list[int]],
) -> None:
    specs, order, cap, groups = problem
    layout = plan(specs, order, cap, groups)
    limit = cap if cap is not None else MAX_DEFAULT_BUCKET_BYTES
    for bucket in layout.buckets:
        assert layout.bucket_nbytes(bucket) <= limit or len(bucket.slots) == 1
        assert len({groups[slot] for slot in bucket.slots}) == 1


@given(problems())
def test_buckets_follow_the_order_of_readiness(
    problem: tuple[list[ParamSpec], list[int], int | None, list[int]],
) -> None:
    specs, order, cap, groups = problem
    layout = plan(specs, order, cap, groups)
    position = {slot: at for at, slot in enumerate(order)}
    last = [max(position[slot] for slot in bucket.slots) for bucket in layout.buckets]
    assert last == sorted(last)
    for bucket in layout.buckets:
        inside = [position[slot] for slot in bucket.slots]
        assert inside == sorted(inside)


@given(problems())
def test_a_plan_is_a_function_of_its_arguments(
    problem: tuple[list[ParamSpec], list[int], int | None, list[int]],
) -> None:
    assert plan(*problem) == plan(*problem)


def test_the_drawing_in_the_module_is_true() -> None:
    specs = [spec("a", (8, 4)), spec("b", (16, 4)), spec("c", (10,)), spec("d", (3,))]
    layout = plan(specs, order=[2, 1, 0, 3], bucket_cap_bytes=320, groups=[0, 0, 0, 1])
    assert [slot.offset for slot in layout.slots] == [80, 16, 0, 112]
    assert [(b.start, b.stop, b.slots) for b in layout.buckets] == [(0, 80, (2, 1)), (80, 112, (0,)), (112, 128, (3,))]
    assert layout.nbytes == 512


def test_the_default_has_small_buckets_at_both_ends() -> None:
    specs = [spec(f"p{i}", (65536,)) for i in range(800)]  # 256 KiB each, 200 MiB in all
    layout = plan(specs, order=list(range(800)), world_size=2)
    sizes = [layout.bucket_nbytes(bucket) for bucket in layout.buckets]
    cap = default_bucket_cap(800 * 65536 * 4, world_size=2, one_machine=False)
    assert max(sizes) <= cap == 200 * 2**20 // 32
    assert sizes[0] <= cap // 4
    assert sizes[-1] <= cap // 4
    assert len(sizes) > 30


def test_one_parameter_larger_than_the_cap_has_its_own_bucket() -> None:
    layout = plan([spec("a", (4,)), spec("big", (1000,)), spec("b", (4,))], [0, 1, 2], bucket_cap_bytes=200)
    assert [bucket.slots for bucket in layout.buckets] == [(0,), (1,), (2,)]


def test_dense_strides_are_kept_and_others_are_not() -> None:
    weight = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    assert ParamSpec.of("w", weight).strides == weight.stride() == (12, 1, 6, 3)
    assert ParamSpec.of("t", torch.zeros(3, 5).t()).strides == (1, 5)
    assert ParamSpec.of("e", torch.zeros(1, 3).expand(4, 3)).strides == (3, 1)
    assert ParamSpec.of("s", torch.zeros(4, 6)[:, :3]).strides == (3, 1)
    assert ParamSpec.of("n", torch.zeros(())).strides == ()


def test_more_ranks_have_fewer_default_buckets() -> None:
    caps = [default_bucket_cap(320 * MIB, ranks, False) // MIB for ranks in (1, 2, 4, 8, 64, 256, 4096)]
    assert caps == [10, 10, 20, 25, 25, 25, 25]
    caps = [default_bucket_cap(32 * MIB, ranks, False) // MIB for ranks in (2, 4, 8, 64, 256, 4096)]
    assert caps == [4, 4, 4, 6, 8, 8]


def test_on_one_machine_default_buckets_have_25_mib_and_less_at_the_ends() -> None:
    specs = [spec(f"p{i}", (MIB,)) for i in range(40)]  # 4 MiB each
    for ranks in (2, 8):
        layout = plan(specs, range(40), world_size=ranks, one_machine=True)
        assert [layout.bucket_nbytes(bucket) // MIB for bucket in layout.buckets] == [4, *[24] * 6, 8, 4]
