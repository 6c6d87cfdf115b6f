"""Trains on when a rank is killed, without it, until the next checkpoint; then exits for a start at full size.

    python examples/go_on_without_a_rank.py run --kill 1

Starts three ranks and kills the second one after seven steps. The others agree on who is left, take the weights of the
rank that is furthest, and train until step 10, where they save and exit with code 75: a scheduler starts the job again,
with all ranks. Start it again by hand, without --kill: it goes on from the checkpoint, to step 20.

The store must outlive the ranks: here the process that starts them has it. torchrun ends all ranks when one ends, so
that it cannot start such a job; Slurm can (srun --kill-on-bad-exit=0), with the store in a process of its own.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_bucketddp import BucketDDP, PeerFailureError

RANKS, STEPS, EVERY, PATH, REQUEUE = 3, 20, 10, "survived.pt", 75
GRACE = 5.0
"""How many seconds ranks wait for others that may be left."""


def agree(store: dist.Store, attempt: int, rank: int, step: int, ranks: list[int]) -> dict[int, int]:
    """The ranks that go on, and the step that each has reached, as the first of them to decide has seen it."""
    store.set(f"{attempt}/{rank}", str(step))
    until = time.monotonic() + GRACE
    while not store.check([f"{attempt}/{each}" for each in ranks]) and time.monotonic() < until:
        time.sleep(0.1)
    seen = {each: int(store.get(f"{attempt}/{each}")) for each in ranks if store.check([f"{attempt}/{each}"])}
    # Waiting alone is no agreement: two ranks may see different members. The first one to write decides for all.
    decided = store.compare_set(f"{attempt}/members", "", json.dumps(seen))
    return {int(each): reached for each, reached in json.loads(decided).items()}


def train(rank: int, store: dist.Store, kill: bool) -> int:
    """Train until the end, or the next checkpoint if a rank is lost; return the exit code."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    optimizer, step = torch.optim.AdamW(module.parameters(), lr=1e-2), 0
    if os.path.exists(PATH):
        module_state, optimizer_state, step = torch.load(PATH)
        module.load_state_dict(module_state)
        optimizer.load_state_dict(optimizer_state)
    members = dict.fromkeys(range(RANKS), step)
    for attempt in range(RANKS):
        ranks = sorted(members, key=lambda each: (-members[each], each))  # the furthest first: its weights count
        group = dist.PrefixStore(f"group {attempt}", store)
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", store=group, rank=ranks.index(rank), world_size=len(ranks), timeout=limit)
        try:
            wrapper = BucketDDP(module)  # copies the first rank's parameters and module buffers
            others = [optimizer.state_dict(), members[ranks[0]]]
            dist.broadcast_object_list(others)
            optimizer.load_state_dict(others[0])
            step = others[1]
            while step < STEPS:
                draw = torch.Generator().manual_seed(1000 * step + ranks.index(rank))
                inputs = torch.randn(16, 8, generator=draw)
                if kill and step == 7:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                (wrapper(inputs) - inputs[:, :4]).square().mean().backward()
                optimizer.step()
                step += 1
                if step % EVERY == 0 or step == STEPS:
                    if ranks[0] == rank:
                        torch.save([module.state_dict(), optimizer.state_dict(), step], PATH + ".new")
                        os.replace(PATH + ".new", PATH)
                    dist.barrier()
                    if len(ranks) < RANKS:
                        break
            weights = sum(param.double().sum().item() for param in module.parameters())
            print(f"rank {rank}: {len(ranks)} ranks at step {step}, sum of weights {weights:.12f}", flush=True)
            dist.barrier()
            dist.destroy_process_group()
            return REQUEUE if len(ranks) < RANKS else 0
        except PeerFailureError as error:
            print(f"rank {rank}: after step {step}: {str(error).splitlines()[0]}", flush=True)
            wrapper.close()
            dist.destroy_process_group()
            members = agree(store, attempt, rank, step, ranks)
            if rank not in members:  # the others have not waited
                break
    return 1


def run(kill: int | None) -> int:
    """Start the ranks, with a store that outlives them; return the exit code of those that were not killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, "rank", "--port", str(store.port)]
    extra = [["--kill", str(rank)] if rank == kill else [] for rank in range(RANKS)]
    ranks = [subprocess.Popen([*command, "--rank", str(rank), *extra[rank]]) for rank in range(RANKS)]
    codes = [rank.wait() for rank in ranks]
    print(f"exit codes {codes}")
    return max(codes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("run", "rank"))
    parser.add_argument("--kill", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    if given.what == "run":
        sys.exit(run(given.kill))
    sys.exit(train(given.rank, dist.TCPStore("127.0.0.1", given.port), given.kill is not None))
