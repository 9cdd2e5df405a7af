"""Scripts that torchrun runs in several processes of this machine's CPU."""

import os
import subprocess
import sys

JOIN = """
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
"""
# A process that leaves while its peer talks may abort it: hence the barrier. gloo's
# threads outlive their group where something keeps a reference to it, as torch._dynamo
# does, which every optimizer imports. An interpreter that ends beside them is aborted,
# now and then: hence an end without one.
LEAVE = """
import os
import sys

dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
"""


def torchrun(ranks):
    """Return the start of a command line: a script and its arguments follow."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks)]


def run_ranks(script, ranks, folder, *arguments):
    """Run the text of a script in joined processes; all of them must end well."""
    path = folder / "ranks.py"
    path.write_text(JOIN + script + LEAVE, encoding="utf-8")
    done = subprocess.run(
        [*torchrun(ranks), str(path), *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
