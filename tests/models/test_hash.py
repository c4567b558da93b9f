import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baton.models.batch import Batch, Decode, Model, Pools, Prefill, StateCheckpoint, allocate
from baton.models.hash import HashModel
from baton.models.hash_definition import MODULUS, add_entry, expected_output, fold_entries, next_state, next_token

PAGE_SIZE = 8
CONFIG = {"model_type": "hash", "vocab_size": 256, "chunk_size": 16, "max_position_embeddings": 4096}


@pytest.fixture(params=[True, False], ids=["pages", "no pages"])
def page_fold(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def states_of(tokens: list[int]) -> list[int]:
    states, state = [], 0
    for position, token in enumerate(tokens):
        state = next_state(state, token, position)
        states.append(state)
    return states


def prefill(
    model: Model,
    pools: Pools,
    parts: list[tuple[int, list[int]]],
    slots: list[int],
    table: torch.Tensor,
    checkpoints: list[StateCheckpoint],
    decode: tuple[list[int], Decode] | None = None,
) -> list[int]:
    """Feed parts (start, tokens) and then decoding rows, and return the greedy token after each fed token."""
    offsets: list[int] = [0]
    tokens: list[int] = []
    positions: list[int] = []
    for start, part in parts:
        tokens += part
        positions += range(start, start + len(part))
        offsets.append(len(tokens))
    packed = Prefill(offsets, [start for start, _ in parts], slots, checkpoints, table)
    if decode is not None:
        tokens += decode[0]
        positions += decode[1].positions.tolist()
    batch = Batch(torch.tensor(tokens), torch.tensor(positions), packed, decode[1] if decode else None)
    return model.logits(model.forward(batch, pools)).argmax(-1).tolist()


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


def random_table(rng: random.Random, rows: int, width: int) -> torch.Tensor:
    pages = list(range(rows * width))
    rng.shuffle(pages)
    return torch.tensor(pages, dtype=torch.int32).view(rows, width)


def test_definition_matches_its_formulas() -> None:
    assert next_state(0, 0, 0) == 69621 + 16807 + 1
    assert next_state(MODULUS - 1, 255, 4095) == ((MODULUS - 1) * 48271 + 256 * 69621 + 4096 * 16807 + 1) % MODULUS
    entries = [(7**i) % MODULUS for i in range(300)]
    assert fold_entries(entries) == sum(e * ((i % 127) + 1) % MODULUS for i, e in enumerate(entries)) % MODULUS
    assert add_entry(fold_entries(entries[:200]), entries[200], 200) == fold_entries(entries[:201])
    assert next_token(5, 11, 1000) == (5 * 31 + 11 * 17 + 7) % 1000


def test_expected_output_feeds_each_token_back(page_fold: bool) -> None:
    tokens = [3, 1, 4, 1, 5]
    output = expected_output(tokens, 40, 97, page_fold=page_fold)
    for i, token in enumerate(output):
        states = states_of(tokens + output[:i])
        assert token == next_token(states[-1], fold_entries(states) if page_fold else 0, 97)
    with pytest.raises(ValueError, match="empty"):
        expected_output([], 1, 97)


def test_definition_imports_no_torch() -> None:
    check = "import sys, baton.models.hash_definition; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", check], cwd=root, check=False).returncode == 0


def test_shapes(page_fold: bool) -> None:
    model: Model = HashModel.from_config(CONFIG | {"page_fold": page_fold})
    pools = allocate(model, 3, 5, PAGE_SIZE, torch.device("cpu"))
    assert [(t.shape, t.dtype) for t in pools.state] == [((3,), torch.int64)]
    assert [(t.shape, t.dtype) for t in pools.pages] == ([((5, PAGE_SIZE), torch.int64)] if page_fold else [])
    assert (model.vocab_size, model.chunk_size, model.max_position) == (256, 16, 4096)
    assert HashModel.from_config(CONFIG).kv_specs() != []


@pytest.mark.parametrize("seed", range(5))
def test_packed_prefill_and_decode_equal_the_definition(seed: int, page_fold: bool) -> None:
    rng = random.Random(seed)
    model = HashModel.from_config(CONFIG | {"page_fold": page_fold})
    rows, steps = rng.randint(2, 6), 12
    prompts = [random_tokens(rng, rng.randint(2, 150)) for _ in range(rows)]
    width = (max(map(len, prompts)) + steps) // PAGE_SIZE + 1
    pools = allocate(model, 3 * rows, rows * width, PAGE_SIZE, torch.device("cpu"))
    table = random_table(rng, rows, width)
    slots = rng.sample(range(3 * rows), rows)
    spare = [s for s in range(3 * rows) if s not in slots]
    cuts = [rng.randint(1, len(p) - 1) for p in prompts]

    prefill(model, pools, [(0, p[:c]) for p, c in zip(prompts, cuts, strict=True)], slots, table, [])
    checkpoints = [
        StateCheckpoint(row, position, spare.pop())
        for row in range(rows)
        for position in {rng.randint(cuts[row] + 1, len(prompts[row])), len(prompts[row])}
    ]
    rest = [(c, p[c:]) for p, c in zip(prompts, cuts, strict=True)]
    greedy = prefill(model, pools, rest, slots, table, checkpoints)
    for c in checkpoints:
        assert int(pools.state[0][c.slot]) == states_of(prompts[c.segment])[c.position - 1]

    ends = torch.tensor([len(part) for _, part in rest]).cumsum(0) - 1
    outputs = [[greedy[end]] for end in ends.tolist()]
    for step in range(steps - 1):
        decode = Decode(torch.tensor(slots), torch.tensor([len(p) + step for p in prompts]), table)
        batch = Batch(torch.tensor([o[-1] for o in outputs]), decode.positions, None, decode)
        for output, token in zip(outputs, model.logits(model.forward(batch, pools)).argmax(-1).tolist(), strict=True):
            output.append(token)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == expected_output(prompt, steps, 256, page_fold=page_fold)
        history = prompt + output[:-1]
        assert int(pools.state[0][slots[prompts.index(prompt)]]) == states_of(history)[-1]


def test_every_prefill_position_has_its_own_output(page_fold: bool) -> None:
    rng = random.Random(7)
    model = HashModel.from_config(CONFIG | {"page_fold": page_fold})
    pools = allocate(model, 3, 20, PAGE_SIZE, torch.device("cpu"))
    running, prompt = random_tokens(rng, 20), random_tokens(rng, 40)
    table = random_table(rng, 2, 10)
    prefill(model, pools, [(0, running[:-1])], [2], table[:1], [])
    decode = (running[-1:], Decode(torch.tensor([2]), torch.tensor([19]), table[:1]))
    greedy = prefill(model, pools, [(0, prompt)], [0], table[1:], [], decode)
    histories = [prompt[: i + 1] for i in range(40)] + [running]
    assert greedy == [expected_output(h, 1, 256, page_fold=page_fold)[0] for h in histories]


@pytest.mark.parametrize("damage", ["state", "first page", "last page", "page order", "position"])
def test_any_wrong_state_or_page_changes_the_output(damage: str) -> None:
    rng = random.Random(11)
    model = HashModel(2**20, 16, 4096)  # a vocabulary so large that two hashes hardly ever give the same token
    pools = allocate(model, 1, 8, PAGE_SIZE, torch.device("cpu"))
    table = random_table(rng, 1, 8)
    prompt = random_tokens(rng, 40)
    prefill(model, pools, [(0, prompt)], [0], table, [])
    position = 40
    if damage == "state":
        pools.state[0][0] += 1
    elif damage == "first page":
        pools.pages[0][table[0, 0].long(), 0] += 1
    elif damage == "last page":
        pools.pages[0][table[0, 4].long(), 7] -= 1
    elif damage == "page order":
        table[0, [1, 2]] = table[0, [2, 1]]
    else:
        position = 41
    decode = Decode(torch.tensor([0]), torch.tensor([position]), table)
    batch = Batch(torch.tensor([9]), decode.positions, None, decode)
    token = int(model.logits(model.forward(batch, pools)).argmax())
    assert token != expected_output([*prompt, 9], 1, 2**20)[0]


def test_logits_are_one_hot() -> None:
    logits = HashModel(10, 16, 4096).logits(torch.tensor([[23], [MODULUS - 1]]))
    assert logits.dtype == torch.float32
    assert logits.tolist() == [[10.0 * (i == n) for i in range(10)] for n in (3, (MODULUS - 1) % 10)]
