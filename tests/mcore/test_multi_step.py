"""Several optimizer steps through the session's own trainer, in every kind of layout, against Hugging Face under AdamW.

Each step's gradient, logprobs and loss are compared, so that whatever a step leaves behind and the next one reads
(gradient buffers, optimizer state, gathered weights, old and reference logprobs) is judged too.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from glm_oracle import stable_topk
from harness import RankResult, assert_equals_oracle, gradient_errors, make_groups, names_of
from oracle import DenseResult, _branch_logprobs, glm_config, make_model, qwen_config

from longstraw_megatron.batch import PromptGroup
from longstraw_megatron.compose import load_config
from longstraw_megatron.config import resolve_auto
from longstraw_megatron.mcore.parallel import init_parallel
from longstraw_megatron.mcore.session import build_trainer
from longstraw_megatron.mcore.weights.gradients import complete_gradients
from longstraw_megatron.rollouts import read_rollouts
from longstraw_megatron.testing import run_ranks

# eps is large, so that Adam does not blow up the rounding of gradients that are nearly 0
LR, EPS, CLIP, KL, STEPS = 0.1, 0.1, 0.5, 0.3, 3
SHAPES = ((21, [5, 1]), (1, [3, 4, 2]), (34, [2, 6]))
STEP_GROUPS = ((0, 1), (2,), (0, 1))  # of groups_per_step=2


def _all_logprobs(model, groups, indices) -> dict:
    return {
        (g, b): _branch_logprobs(model, groups[g]["prompt"], response, None)
        for g in indices
        for b, response in enumerate(groups[g]["responses"])
    }


def _loss(logprobs, old, ref, groups, indices) -> torch.Tensor:
    total = 0.0
    for (g, b), new in logprobs.items():
        advantage, size = groups[g]["advantages"][b], len(groups[g]["responses"])
        ratio, gap = torch.exp(new - old[g, b]), ref[g, b] - new
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        tokens = -gain + KL * (torch.exp(gap) - gap - 1)
        total = total + tokens.mean() / size / len(indices)
    return total


def dense_steps(model, reference, groups) -> list[DenseResult]:
    """Each step's loss, logprobs and unclipped gradient."""
    truth, optimizer = [], torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    with torch.no_grad():
        old, ref = (_all_logprobs(m, groups, range(len(groups))) for m in (model, reference))
    for indices in STEP_GROUPS:
        model.zero_grad(set_to_none=True)
        logprobs = _all_logprobs(model, groups, indices)
        loss = _loss(logprobs, old, ref, groups, indices)
        loss.backward()
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        step_logprobs = {(indices.index(g), b): values.detach() for (g, b), values in logprobs.items()}
        truth.append(DenseResult(step_logprobs, grads, float(loss.detach())))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return truth


@dataclass(frozen=True)
class Case:
    folder: Path
    hf: dict
    groups: list
    truth: list[DenseResult]


def _case(folder, config) -> Case:
    models = {name: make_model(config, seed=seed) for name, seed in (("policy", 0), ("reference", 1))}
    for name, model in models.items():
        model.save_pretrained(folder / name)
    groups = make_groups(*SHAPES)
    lines = [
        {
            "group_id": f"g{g}",
            "prompt_tokens": group["prompt"].tolist(),
            "branches": [
                {"tokens": response.tolist(), "reward": 0.0, "advantage": advantage}
                for response, advantage in zip(group["responses"], group["advantages"], strict=True)
            ],
        }
        for g, group in enumerate(groups)
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    hf = models["policy"].config.to_dict() | {"architectures": config.architectures}
    with stable_topk():
        return Case(folder, hf, groups, dense_steps(models["policy"], models["reference"], groups))


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    made = {}

    def get(name: str) -> Case:
        if name not in made:
            tied = {"tie_word_embeddings": name.endswith("tied")}
            make, layers = (glm_config, 7) if name.startswith("glm") else (qwen_config, 4)
            made[name] = _case(tmp_path_factory.mktemp(name), make(num_hidden_layers=layers, **tied))
        return made[name]

    return get


def _run_rank(rank, world_size, case, words):
    config = resolve_auto(
        load_config(
            [
                *(f"model.hf_path={case.folder}/policy", f"reference.hf_path={case.folder}/reference", "device=cpu"),
                *("groups_per_step=2", f"trainer.max_steps={STEPS}", f"objective.kl_coef={KL}", "state.page_length=8"),
                *(f"optimizer.lr={LR}", f"optimizer.eps={EPS}", f"optimizer.clip_grad={CLIP}", "segment_length=8"),
                *("wandb.mode=disabled", *words),
            ]
        ),
        cuda_available=False,
    )
    context = init_parallel(config.parallel, device=torch.device("cpu"), seed=1, timeout_s=60)
    groups: list[PromptGroup] = read_rollouts(case.folder / "rollouts.jsonl", vocab_size=128)
    trainer = build_trainer(config, groups, context)
    learner, records = trainer.learner, []
    compute = learner.compute_gradients

    def watched(*args, **kwargs):
        stats, logprobs = compute(*args, **kwargs)
        complete_gradients(learner.chunks)  # a distributed optimizer leaves a shard of them
        errors, missing = gradient_errors(learner, case.hf, case.truth[len(records)].grads)
        records.append(RankResult(errors, logprobs, stats, missing))
        return stats, logprobs

    learner.compute_gradients = watched
    trainer.run(lambda step, metrics: None)
    return records


CASES = {
    "qwen recompute, packed": (1, ["recompute=full", "branches_per_microbatch=2"]),
    "qwen cp2": (2, ["parallel.cp=2"]),
    "qwen tp2 without sp": (2, ["parallel.tp=2", "parallel.sp=false"]),
    "qwen_tied pp2 dp2": (4, ["parallel.pp=2"]),
    "glm ep2 recompute": (2, ["parallel.ep=2", "recompute=full"]),
    "glm_tied pp2 ep2": (4, ["parallel.ep=2", "parallel.pp=2"]),
}


WIDE = ("qwen tp2 without sp", "glm ep2 recompute", "qwen_tied pp2 dp2")


@pytest.mark.parametrize("name", names_of(CASES, wide=WIDE))
def test_every_step_equals_hugging_face_under_adamw(cases, name):
    world_size, words = CASES[name]
    case = cases(name.split()[0])
    assert len({round(step.loss, 3) for step in case.truth}) == STEPS, "steps differ"
    ranks = run_ranks(world_size, _run_rank, case, words)
    for got, want in zip(zip(*ranks, strict=True), case.truth, strict=True):
        assert_equals_oracle(list(got), want)
