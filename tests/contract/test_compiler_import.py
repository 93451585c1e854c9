"""torch's compiler is imported when something asks for it. In processes of their own: this one may have it already."""

import subprocess
import sys
from textwrap import dedent

import pytest

_BEGIN = """
import inspect, os, sys, torch

torch.set_num_threads(1)
os.environ["FALLOW_WORKER"] = "n0"
import fallow
from fallow.worker.prepared.signature import enforce

def real():
    return "torch._dynamo.eval_frame" in sys.modules

def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()

model = torch.nn.Linear(3, 3)
optimizers = [torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)]
optimizer = optimizers[0]
for each in optimizers:
    step(model, each)
    each.load_state_dict(each.state_dict())
torch.optim.lr_scheduler.StepLR(optimizer, 1).step()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
enforce([])
assert torch.are_deterministic_algorithms_enabled()
assert inspect.getmodule(compile("", "nowhere", "exec")) is None  # looks at all modules
assert not real(), "something brings the compiler in"
kept = torch.optim.Optimizer.zero_grad.__wrapped__
assert getattr(kept, "__dynamo_disable") is kept
"""

_USES = {
    "a submodule": """
        import torch._dynamo.config as config
        assert config is torch._dynamo.config is sys.modules["torch._dynamo.config"]
        assert config.__spec__.origin.endswith("config.py")
        from torch._dynamo.utils import counters
        assert counters is sys.modules["torch._dynamo.utils"].counters
        assert config.__spec__ is sys.modules["torch._dynamo.config"].__spec__
        import torch._inductor.config as inductor
        assert inductor.deterministic
        inductor.deterministic = False
        enforce([])
        assert inductor.deterministic
    """,
    "torch.compile": """
        assert torch.compiler.disable(step) is not step
        graphs = []
        def count(graph, inputs):
            graphs.append(graph)
            return graph.forward
        compiled = torch.compile(model, backend=count)
        for each in optimizers:
            step(compiled, each)
        assert len(graphs) == 1
        # What the stand-in answered is asked again: the compiler has to see which functions it must leave alone.
        assert getattr(kept, "__dynamo_disable") is not kept
        torch.compile(optimizer.step, backend=count)()
        assert len(graphs) > 1
    """,
}

_END = """
assert real() and torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.__file__
step(model, optimizer)
print("to the end")
"""


@pytest.mark.parametrize("use", _USES)
def test_optimizers_do_without_the_compiler_until_something_asks_for_it(use: str) -> None:
    script = _BEGIN + dedent(_USES[use]) + dedent(_END)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "to the end\n"
