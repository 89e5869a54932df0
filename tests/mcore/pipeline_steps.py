"""A small pipeline of one's own: models, samples, a forward step and losses as RL pipelines write them, and one step.

The same forward step and losses run full sequences through a stock model by Megatron's schedule, and branch samples
through a segment model by ours.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func as get_megatron_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from stock_models import COMMON, GLM, QWEN, VOCAB

from longstraw_megatron.mcore.model import prepare_chunk
from longstraw_megatron.mcore.prompt_batch import PromptMicrobatch, sample_tokens
from longstraw_megatron.mcore.sparse_attention import freeze_indexer
from longstraw_megatron.mcore.specs import segment_block_spec

LENGTH = 48  # what dense samples are padded to

# every key is selected, so that no tie among index scores decides anything
_GLM = GLM | {"dsa_indexer_topk": 64, "num_layers": 4}


@dataclass(frozen=True)
class Sample:
    """Tokens whose first `prompt_length` are not trained on."""

    name: str
    tokens: torch.Tensor
    prompt_length: int
    advantage: float
    mask: torch.Tensor  # [R], of the response


@dataclass(frozen=True)
class Loss:
    """How a pipeline scales its loss: `num_microbatches` is what it takes Megatron to divide by."""

    kind: str
    num_microbatches: int
    num_samples: int = 0  # over all data-parallel ranks

    def __call__(self, sample: Sample, padded_length: int, logits: torch.Tensor, non_loss_data: bool = False):
        assert logits.dtype is torch.float32
        cp, dp = parallel_state.get_context_parallel_world_size(), parallel_state.get_data_parallel_world_size()
        targets, weights = (_padded(t, logits.shape[1]) for t in _targets(sample, padded_length))
        logprobs = -vocab_parallel_cross_entropy(logits.transpose(0, 1).contiguous(), targets[:, None])[:, 0]
        mask = (weights != 0).float()
        if non_loss_data:
            return {"name": sample.name, "with_graph": logits.requires_grad, "logprobs": _whole(logprobs * mask)}
        loss = -(weights * logprobs).sum()
        data = {"name": sample.name, "loss": loss.detach().clone()}
        if self.kind == "token sum":
            return loss, mask.sum().int(), data
        loss = loss / sample.mask.sum().clamp(min=1)
        if self.kind == "mean":
            return loss, data
        if self.kind == "mean of 3":
            return loss * sample.mask.sum(), sample.mask.sum().int(), data
        loss = loss * self.num_microbatches / self.num_samples * dp
        return (loss * cp, torch.tensor(1), data) if self.kind == "scaled of 3" else (loss, data)


def _zigzag(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part [S / CP] of [S]."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    pieces = tensor.chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def _whole(local: torch.Tensor) -> torch.Tensor:
    """The sum over CP of what ranks have of a sample: enough to compare, in any cut."""
    total = local.detach().sum()
    torch.distributed.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return total


def _targets(sample: Sample, padded_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token to predict and weight in the loss, of this rank's rows."""
    start, length = sample.prompt_length, len(sample.tokens)
    targets, weights = torch.zeros(padded_length, dtype=torch.int64), torch.zeros(padded_length)
    targets[: length - 1] = sample.tokens[1:]
    weights[start - 1 : length - 1] = sample.advantage * sample.mask
    return _zigzag(targets), _zigzag(weights)


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, rows - len(tensor)))


def forward_step(iterator, model, *, loss: Loss, multiple: int, packed: bool = False):
    """As Megatron's users write it: pad to a multiple, cut over CP, run the model, leave the loss to a closure.

    `packed` is a packed batch of one sample, with more padding behind it, as slime makes it.
    """
    sample = next(iterator)
    tokens = torch.zeros(-(-len(sample.tokens) // multiple) * multiple, dtype=torch.int64)
    tokens[: len(sample.tokens)] = sample.tokens
    positions = _zigzag(torch.arange(len(tokens)))
    inputs, params = _zigzag(tokens), None
    if packed:
        inputs = _padded(inputs, -(-len(inputs) // 16) * 16)
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, len(tokens)]))
    output = model(inputs[None], positions[None], None, packed_seq_params=params)
    return output, partial(loss, sample, len(tokens))


def make_microbatches(*shapes: tuple[int, list[int]], seed: int = 0) -> list[PromptMicrobatch]:
    """Groups of (prompt length, response lengths), their samples as branches."""
    generator = torch.Generator().manual_seed(seed)
    microbatches = []
    for g, (prompt_length, lengths) in enumerate(shapes):
        prompt = torch.randint(1, VOCAB, (prompt_length,), generator=generator)
        responses = [torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths]
        sequences = [torch.cat([prompt, response]) for response in responses]
        samples = []
        for b, response in enumerate(responses):
            mask = torch.ones(len(response))
            mask[1:-1:3] = 0
            tokens = torch.cat([prompt[-1:], response])
            samples.append(Sample(f"{seed}.{g}.{b}", tokens, 1, advantage=1.0 - 0.7 * b, mask=mask))
        microbatch = PromptMicrobatch.from_sequences(f"g{g}", sequences, lengths, samples)
        for b, sample in enumerate(samples):
            assert sample.tokens.tolist() == sample_tokens(microbatch.group, b).tolist()
        microbatches.append(microbatch)
    return microbatches


def full_samples(microbatches: list[PromptMicrobatch]) -> list[Sample]:
    """The same branches as full sequences."""
    return [
        replace(
            sample,
            tokens=torch.cat([torch.from_numpy(microbatch.group.prefix_tokens), sample.tokens]),
            prompt_length=len(microbatch.group.prompt_tokens),
        )
        for microbatch in microbatches
        for sample in microbatch.samples
    ]


@dataclass(frozen=True)
class Pipeline:
    """A model in one layout."""

    model: str = "qwen"
    vpp: int = 1
    sp: bool = False
    per_token: bool = False  # calculate_per_token_loss
    overrides: dict = field(default_factory=dict)
    ddp: dict = field(default_factory=dict)

    def build(self, groups, *, ours: bool) -> list[DistributedDataParallel]:
        """Chunks with the weights of this rank, stock or with segments."""
        config_class = MLATransformerConfig if self.model == "glm" else TransformerConfig
        fields = {
            **COMMON,
            **(_GLM if self.model == "glm" else QWEN),
            "tensor_model_parallel_size": groups.tp.size(),
            "pipeline_model_parallel_size": groups.pp.size(),
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "context_parallel_size": groups.cp.size(),
            "expert_model_parallel_size": groups.ep.size(),
            "expert_tensor_parallel_size": groups.expt_tp.size(),
            "sequence_parallel": self.sp,
            "calculate_per_token_loss": self.per_token,
            "finalize_model_grads_func": finalize_model_grads,
        }
        config = config_class(**(fields | self.overrides))
        return [self._chunk(config, groups, vp_stage, ours) for vp_stage in range(self.vpp)]

    def _chunk(self, config, groups, vp_stage: int, ours: bool) -> DistributedDataParallel:
        pp_rank, pp_size = groups.pp.rank(), groups.pp.size()
        stage = vp_stage * pp_size + pp_rank
        vp_argument = vp_stage if self.vpp > 1 else None
        spec = get_transformer_block_with_experimental_attention_variant_spec(config, vp_argument, pp_rank)
        chunk = GPTModel(
            config,
            segment_block_spec(spec) if ours else spec,
            vocab_size=VOCAB,
            max_sequence_length=LENGTH,
            pre_process=stage == 0,
            post_process=stage == pp_size * self.vpp - 1,
            position_embedding_type="rope",
            rotary_percent=0.25 if self.model == "qwen" else 1.0,
            share_embeddings_and_output_weights=False,
            pg_collection=groups,
            vp_stage=vp_argument,
        )
        _seed_weights(chunk, groups, stage)
        freeze_indexer(chunk)
        if ours:
            prepare_chunk(chunk, torch.device("cpu"))
        chunk = Float16Module(config, chunk) if config.bf16 else chunk
        ddp_config = DistributedDataParallelConfig(**self.ddp)
        return DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=vp_stage > 0, pg_collection=groups)


def _seed_weights(chunk: GPTModel, groups, stage: int) -> None:
    """Alike on all ranks that hold the same weights, and in stock and segment models."""
    with torch.no_grad():
        for place, (name, parameter) in enumerate(chunk.named_parameters()):
            is_expert = not getattr(parameter, "allreduce", True)
            shard = groups.tp.rank() * getattr(parameter, "tensor_model_parallel", False)
            shard += 10 * groups.ep.rank() * is_expert
            generator = torch.Generator().manual_seed(1000 * stage + 100000 * shard + place)
            noise = torch.randn(parameter.shape, generator=generator)
            if "A_log" in name:
                parameter.copy_(noise.abs())
            elif parameter.dim() >= 2:
                parameter.copy_(noise * 0.1)
            else:
                parameter.add_(noise * 0.1)


def run_step(
    func: Callable,
    chunks: list[DistributedDataParallel],
    data: list,
    loss: Loss,
    *,
    multiple: int = 2,
    packed: bool = False,
    **kwargs,
) -> list:
    """One schedule call over `data` on fresh gradients, unless `keep`; what it returns."""
    if not kwargs.pop("keep", False):
        for chunk in chunks:
            chunk.zero_grad_buffer()
    return func(
        forward_step_func=partial(forward_step, loss=loss, multiple=multiple, packed=packed),
        data_iterator=[iter(data) for _ in chunks] if len(chunks) > 1 else iter(data),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(data),
        seq_length=LENGTH,
        micro_batch_size=1,
        **kwargs,
    )


def run_stock(pipeline: Pipeline, groups, microbatches: list[PromptMicrobatch], loss: Loss, **kwargs):
    """(chunks, returned) of Megatron's own schedule over the full sequences, in the stock model."""
    chunks = pipeline.build(groups, ours=False)
    samples = full_samples(microbatches)
    loss = replace(loss, num_microbatches=len(samples))
    return chunks, run_step(get_megatron_func(), chunks, samples, loss, multiple=LENGTH, **kwargs)


def grads(chunks: list[DistributedDataParallel]) -> dict[str, torch.Tensor]:
    """main_grad of every trainable parameter."""
    return {
        f"{i}.{name}": parameter.main_grad.detach().clone()
        for i, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }
