"""The rollouts file: what is read, and every refusal with its file, line, group and branch."""

import json

import numpy as np
import pytest

from longstraw_megatron.errors import RefusedError
from longstraw_megatron.rollouts import length_warnings, read_rollouts

BRANCH = {"tokens": [5, 6, 7], "reward": 1.0}
GROUP = {"group_id": "g0", "prompt_tokens": [1, 2, 3], "branches": [BRANCH, {"tokens": [8], "reward": 0.0}]}


def branch(**changes) -> dict:
    return GROUP | {"branches": [BRANCH | changes, *GROUP["branches"][1:]]}


def write(tmp_path, *lines) -> str:
    path = tmp_path / "r.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


REFUSED = {
    "broken JSON": ([GROUP, '{"group_id": '], "line 2 must be one JSON object"),
    "not an object": (["[1, 2]"], "line 1 must be a JSON object, got list"),
    "empty line": ([GROUP, ""], "line 2 must be one JSON object"),
    "no branches": ([GROUP | {"branches": []}], "line 1, group 'g0' has no branches"),
    "empty response": ([branch(tokens=[])], "group 'g0', branch 0, response"),
    "empty prompt": ([GROUP | {"prompt_tokens": []}], "group 'g0', prompt"),
    "token outside the vocabulary": ([branch(tokens=[5, 100])], "branch 0, response.*100"),
    "negative token": ([GROUP | {"prompt_tokens": [1, -1]}], "prompt.*-1"),
    "token that is no integer": ([branch(tokens=[5, 6.0])], "branch 0"),
    "token that is a truth value": ([branch(tokens=[5, True])], "branch 0"),
    "lists of unequal length": ([branch(loss_mask=[1, 1])], "branch 0.*loss_mask.*3 tokens.*2 entries"),
    "logprobs of unequal length": ([branch(old_logprobs=[-1.0] * 4)], "branch 0.*old_logprobs.*3 tokens.*4 entries"),
    "NaN reward": (
        ['{"group_id": "g0", "prompt_tokens": [1], "branches": [{"tokens":[2],"reward":NaN}]}'],
        "reward",
    ),
    "infinite advantage": (
        ['{"group_id":"g0","prompt_tokens":[1],"branches":[{"tokens":[2],"reward":1,"advantage":Infinity}]}'],
        "branch 0.*advantage",
    ),
    "no reward": ([GROUP | {"branches": [{"tokens": [1]}]}], "branch 0 has no 'reward'"),
    "no unmasked token in a group": (
        [GROUP | {"branches": [BRANCH | {"loss_mask": [0, 0, 0]}]}],
        "group 'g0' has no token with a loss_mask of 1",
    ),
    "mask of twos": ([branch(loss_mask=[1, 2, 1])], "loss_mask"),
    "unknown field": ([branch(rewrd=1.0)], "branch 0 has the unknown field 'rewrd'"),
    "unknown field of a group": ([GROUP | {"prompts": 1}], "line 1 has the unknown field 'prompts'"),
    "same group twice": ([GROUP, GROUP], "line 2 has the group_id 'g0' again; line 1"),
    "same key twice": (['{"group_id": "a", "group_id": "b"}'], "'group_id' twice"),
    "some advantages": ([branch(advantage=1.0)], "mixes branches with an 'advantage' .0. and without .1."),
    "text without a tokenizer": ([GROUP | {"branches": [{"text": "abc", "reward": 1.0}]}], "tokenizer"),
    "tokens and text": ([branch(text="abc")], "either 'tokens' or 'text', got both"),
    "one expert twice": ([branch(routed_experts=[[[0, 1]], [[1, 1]], [[0, 1]]])], "no expert twice.*at token 1"),
    "experts beyond int64": ([branch(routed_experts=[[[0, 2**63]]] * 3)], "branch 0.*routed_experts"),
    "reward beyond float32": ([branch(reward=1e308)], "reward.*float32"),
    "logprob beyond float32": ([branch(old_logprobs=[-1.0, -1e300, 0.0])], "old_logprobs.*float32.*token 1"),
    "reward of 400 digits": ([branch(reward=10**400)], "reward"),
    "ragged experts": ([branch(routed_experts=[[[0, 1]], [[0]], [[0, 1]]])], "routed_experts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_sentence_that_names_the_place(tmp_path, name):
    lines, words = REFUSED[name]
    path = write(tmp_path, *lines)
    with pytest.raises(RefusedError, match=words) as error:
        read_rollouts(path, vocab_size=100)
    message = str(error.value)
    assert str(path) in message and "\n" not in message.strip() and message.rstrip().endswith(".")


def test_missing_empty_and_unknown_files_are_refused(tmp_path):
    for path, words in (
        (None, "not set"),
        (tmp_path / "none.jsonl", "no such file"),
        (tmp_path, "a folder"),
        (write(tmp_path), "is empty"),
    ):
        with pytest.raises(RefusedError, match=words):
            read_rollouts(path, vocab_size=100)
    (tmp_path / "r.bin").write_text("x")
    with pytest.raises(RefusedError, match=r"suffix '.bin'"):
        read_rollouts(tmp_path / "r.bin", vocab_size=100)


def test_every_field_is_read(tmp_path):
    full = BRANCH | {
        "advantage": 0.5,
        "loss_mask": [1, 0, 1],
        "old_logprobs": [-1, -2.5, -3],
        "ref_logprobs": [-1.0, -2.0, -3.0],
        "rollout_logprobs": [-1.0, -2.0, -3.5],
        "routed_experts": [[[0, 1], [2, 3]]] * 3,
        "status": "completed",
    }
    path = write(tmp_path, GROUP | {"branches": [full]}, GROUP | {"group_id": "g1"})
    first, second = read_rollouts(path, vocab_size=100)
    (read,) = first.branches
    assert first.group_id == "g0" and first.prompt_tokens.tolist() == [1, 2, 3] and second.group_size == 2
    assert (read.reward, read.advantage, read.status, read.num_loss_tokens) == (1.0, 0.5, "completed", 2)
    assert read.old_logprobs.tolist() == [-1.0, -2.5, -3.0] and read.rollout_logprobs[2] == -3.5
    assert read.routed_experts.shape == (3, 2, 2)
    assert second.branches[0].loss_mask is None and second.branches[0].old_logprobs is None


def test_text_is_read_as_bytes_or_by_a_tokenizer_file(tmp_path):
    text = {"group_id": "t", "prompt": "Ab", "branches": [{"text": "c\u00e9", "reward": 1.0}]}
    path = write(tmp_path, text)
    (group,) = read_rollouts(path, tokenizer="bytes", vocab_size=256)
    assert group.prompt_tokens.tolist() == [65, 98] and group.branches[0].tokens.tolist() == [99, 0xC3, 0xA9]
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"Ab": 0, "c\u00e9": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (group,) = read_rollouts(path, tokenizer=str(tmp_path), vocab_size=3)
    assert group.prompt_tokens.tolist() == [0] and group.branches[0].tokens.tolist() == [1]
    with pytest.raises(RefusedError, match="nowhere"):
        read_rollouts(path, tokenizer="nowhere", vocab_size=3)


def test_a_prompt_beyond_the_models_positions_is_a_warning_with_both_numbers(tmp_path):
    groups = read_rollouts(write(tmp_path, GROUP), vocab_size=100)
    assert length_warnings(groups, 6) == [] and length_warnings(groups, None) == []
    (warning,) = length_warnings(groups, 5)
    assert "3 prompt tokens, up to 6" in warning and "max_position_embeddings of 5" in warning


def test_numbers_are_arrays(tmp_path):
    (group,) = read_rollouts(write(tmp_path, GROUP), vocab_size=100)
    assert group.prompt_tokens.dtype == np.int64 and group.branches[0].tokens.dtype == np.int64
