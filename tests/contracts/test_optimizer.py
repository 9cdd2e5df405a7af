"""Contract of an optimizer: (groups, **keys), as the trainer builds and uses it.

Groups come from `parameter_groups`: every parameter of a model by role. What a rule
does with a gradient is its own matter; "muon" has a contract for that besides.
"""

import copy
import io

import torch

from littlelm_core.model import LanguageModel, ModelConfig, parameter_role
from littlelm_core.trainer import parameter_groups

PART = "littlelm_core.optim:MuonAdamW"

SHAPE = {
    "dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 24, "vocab_size": 60,
    "context": 8, "residual_scales": True, "value_embeddings": True,
}  # fmt: skip


def make(part, dtype=torch.float32, options=None, **keys):
    """A model of every role, and the part over all of its parameters."""
    model = LanguageModel(ModelConfig(**SHAPE))
    model.init_weights(1)
    model.to(dtype)
    groups, shared = parameter_groups(model, options or {"lr": 0.01, **keys})
    return model, part(groups, **shared)


def learn(model, seed):
    """Put the gradient of one small batch into `.grad`; return the loss."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, (4, 9), generator=draw).cumsum(1) % 60  # to be learned
    model.zero_grad()
    loss = model.loss(ids[:, :-1], ids[:, 1:])
    loss.backward()
    return float(loss.detach())


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_every_parameter_is_in_the_group_of_its_role(part):
    model, optimizer = make(part)
    names = {id(p): name for name, p in model.named_parameters()}
    seen = []
    for group in optimizer.param_groups:
        assert "lr" in group, f"group {group.get('name')} has no rate of its own"
        for p in group["params"]:
            seen.append(names[id(p)])
            role = parameter_role(seen[-1])
            assert group.get("name") == role, f"{seen[-1]} ({role}) in {group['name']}"
    assert sorted(seen) == sorted(names.values()), "each parameter is in one group"


def test_a_group_has_its_own_keys(part):
    options = {"lr": 0.01, "head": {"lr": 0.5, "weight_decay": 0.25}}
    _, optimizer = make(part, options=options)
    found = {g["name"]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups}
    assert found["head"] == (0.5, 0.25)
    assert {lr for name, (lr, _) in found.items() if name != "head"} == {0.01}
    assert found["norm"][1] == found["scalars"][1] == 0, "gains are not decayed"


def test_the_rate_of_a_group_is_read_at_every_step(part):
    for moving in ("matrix", "embedding", "head"):
        model, optimizer = make(part, weight_decay=0.5)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 if group["name"] == moving else 0.0
        before = weights(model)
        learn(model, 0)
        optimizer.step()
        for name, p in model.named_parameters():
            if parameter_role(name) != moving:
                assert torch.equal(p, before[name]), (
                    f"{name} moved, though the rate of its group is 0: a schedule sets "
                    'group["lr"] before each step, and decay is multiplied by it too'
                )
        still = [torch.equal(p, before[n]) for n, p in model.named_parameters()]
        assert not all(still), f"nothing of {moving} moved at a rate of 0.01"
        before = weights(model)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        learn(model, 1)
        optimizer.step()
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters()), (
            f"{moving} moved by the rate of its first step, and the rate is 0 now"
        )


def test_decay_is_decoupled_and_only_where_it_is_wanted(part):
    decays = {"matrix": 0.5, "head": 0.25, "embedding": 0.0}
    tables = {role: {"weight_decay": value} for role, value in decays.items()}
    model, optimizer = make(part, options={"lr": 0.1, **tables})
    before = weights(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        role = parameter_role(name)
        if role != "value_embeddings":
            kept = 1 - 0.1 * decays.get(role, 0.0)
            assert torch.allclose(p, kept * before[name], atol=1e-7), (
                f"{name}: after a gradient of zero a weight is 1 - lr · weight_decay = "
                f"{kept} of what it was ({role})"
            )


def test_without_a_gradient_nothing_moves(part):
    model, optimizer = make(part, weight_decay=0.5)
    learn(model, 0)
    roles = {n: parameter_role(n) for n, _ in model.named_parameters()}
    frozen = [
        n for n, role in roles.items() if role == "head" or n.startswith("blocks.0")
    ]
    assert {roles[n] for n in frozen} >= {"matrix", "head", "norm"}
    for name, p in model.named_parameters():
        if name in frozen:
            p.grad = None
    before = weights(model)
    optimizer.step()
    for name, p in model.named_parameters():
        if name in frozen:
            assert torch.equal(p, before[name]), f"{name} moved without a gradient"


def test_it_learns(part):
    for dtype in (torch.float32, torch.bfloat16):
        model, optimizer = make(part, dtype)
        losses = []
        for step in range(30):
            losses.append(learn(model, step))
            optimizer.step()
        assert losses[-1] < losses[0] - 0.05, (
            f"{dtype}: from {losses[0]:.2f} to {losses[-1]:.2f} in 30 steps"
        )
        assert {p.dtype for p in model.parameters()} == {dtype}


def test_a_resume_is_exact(part):
    for dtype in (torch.float32, torch.bfloat16):
        model, optimizer = make(part, dtype, weight_decay=0.1)
        for step in range(3):
            learn(model, step)
            optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        copied = copy.deepcopy(model)
        groups, shared = parameter_groups(copied, {"lr": 0.01, "weight_decay": 0.1})
        resumed = part(groups, **shared)
        resumed.load_state_dict(torch.load(file))
        torch.manual_seed(77)
        for step in range(3, 6):
            for some, one in ((model, optimizer), (copied, resumed)):
                learn(some, step)
                one.step()
        for (name, p), q in zip(
            model.named_parameters(), copied.parameters(), strict=True
        ):
            assert torch.equal(p, q), f"{dtype}: {name} differs after a resume"
        names = [g["name"] for g in resumed.param_groups]
        assert names == [g["name"] for g in optimizer.param_groups]


def test_gradients_are_set_free(part):
    model, optimizer = make(part)
    learn(model, 0)
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
