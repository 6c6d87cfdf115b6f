"""Compares the order in which ranks start collectives, on one communicator and across several."""

Started = tuple[str, str, int, str]
"""A collective, as a rank starts it: group, operation, elements, dtype."""


def order_conflicts(logs: list[list[Started]]) -> list[str]:
    """Describe where ranks differ in the order of what they start: there NCCL's kernels may wait for each other.

    Of two ranks, only groups that both have started something in are compared.
    """
    found = []
    for first in range(len(logs)):
        for second in range(first + 1, len(logs)):
            groups = {group for group, *_ in logs[first]} & {group for group, *_ in logs[second]}
            mine, others = ([one for one in logs[rank] if one[0] in groups] for rank in (first, second))
            for index, (one, other) in enumerate(zip(mine, others, strict=False)):
                if one != other:
                    found.append(f"collective {index} is {one} on rank {first}, and {other} on rank {second}")
                    break
            else:
                if len(mine) != len(others):
                    found.append(f"rank {first} starts {len(mine)} collectives, rank {second} {len(others)}")
    return found
