import torch
from tokenizers import Tokenizer

from baton.models.batch import Batch, Decode, Prefill, allocate
from baton.models.loading.checkpoint import load_model
from tests.models.oracle import END_OF_TURN, SPECIAL_TOKENS, Oracle

CPU = torch.device("cpu")


def test_tokenizer_gives_each_byte_its_own_id(oracle: Oracle) -> None:
    tokenizer = Tokenizer.from_file(str(oracle.checkpoint("mamba2") / "tokenizer.json"))
    text = "Grüße, 世界\n"
    assert tokenizer.encode(text, add_special_tokens=False).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [256, 257, END_OF_TURN]
    assert tokenizer.encode("a<|im_end|>", add_special_tokens=False).ids == [97, END_OF_TURN]


def test_greedy_continuation_is_reproduced_by_prefill_and_decode(oracle: Oracle) -> None:
    path = oracle.checkpoint("nemotron_h")
    prompt = list(b"The relay begins with")
    model = load_model(path, None, CPU)
    pools, table = allocate(model, 1, 4, 16, CPU), torch.tensor([[2, 0, 3]], dtype=torch.int32)
    start = Prefill([0, len(prompt)], [0], [0], [], table)
    hidden = model.forward(Batch(torch.tensor(prompt), torch.arange(len(prompt)), start, None), pools)
    tokens = [int(model.logits(hidden)[-1].argmax())]
    for position in range(len(prompt), len(prompt) + 15):
        place = torch.tensor([position])
        step = Batch(torch.tensor(tokens[-1:]), place, None, Decode(torch.tensor([0]), place, table))
        tokens.append(int(model.logits(model.forward(step, pools))[-1].argmax()))
    assert tokens == oracle.greedy(path, prompt, 16)
    assert len(set(tokens)) > 3
