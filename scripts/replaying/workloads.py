"""Workloads drawn from a seed. A client is a generator that yields requests and is sent the answers.

Prompts and answers consist of units; a unit stands for 16 tokens (costs.py).
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

Answer = list[int]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Lengths and positions are in units."""

    pause: float  # virtual seconds since the previous answer, or since the client's arrival
    tokens: list[int]  # the prompt
    answer: int  # length of the answer
    ends: tuple[int, ...] = ()  # end of each message of the prompt
    salt: str = ""
    known_answer: Sequence[int] = ()  # the answer, if it was recorded


Client = Generator[Ask, Answer, None]


@dataclass(frozen=True)
class Arrival:
    """A client, and the virtual second at which it starts."""

    at: float
    client: Client


@dataclass(frozen=True)
class Workload:
    """A source of clients."""

    draw: Callable[[Random, int], Iterator[Arrival]]  # arrivals in order, for about this many requests
    block: int = 1  # units of a block; common prefixes of prompts are whole blocks


@dataclass
class Talk:
    """A conversation so far."""

    tokens: list[int]
    salt: str = ""
    ends: list[int] = field(default_factory=list)  # end of each message

    def say(self, new: list[int]) -> None:
        self.tokens = self.tokens + new
        self.ends.append(len(self.tokens))

    def ask(self, pause: float, answer: int) -> Ask:
        return Ask(pause, self.tokens, answer, tuple(self.ends), self.salt)

    def hear(self, answer: Answer) -> None:
        self.say(answer)


def text(rng: Random, low: int, high: int) -> list[int]:
    """Return `low` to `high` random units, which practically never occur elsewhere."""
    return [rng.getrandbits(31) for _ in range(rng.randint(low, high))]


def chat(rng: Random, system: list[int], turns: int, pause: Callable[[], float], salt: str = "") -> Client:
    """Hold a conversation of `turns` questions and answers."""
    talk = Talk(system, salt, [len(system)] if system else [])
    for _ in range(turns):
        talk.say(text(rng, 2, 12))
        talk.hear((yield talk.ask(pause(), rng.randint(4, 24))))


def chats_in_turns(rng: Random, requests: int) -> Iterator[Arrival]:
    """Run 128 conversations whose turns alternate round-robin; then 128 other conversations, and so on."""
    count, turns = 128, 12
    for group in range(max(1, requests // (count * turns))):
        begin = group * turns * count * 0.2
        for index in range(count):
            child = Random(rng.random())
            yield Arrival(begin + index * 0.2, chat(child, [], turns, lambda: count * 0.2))


def chats_at_random(rng: Random, requests: int) -> Iterator[Arrival]:
    """Run conversations of users that differ in activity, with a few system prompts and some long pauses."""
    prompts = [text(rng, 20, 80) for _ in range(5)]
    at = 0.0
    made = 0
    while made < requests:
        child, zeal = Random(rng.random()), rng.paretovariate(1.2)
        turns = min(60, 1 + int(3 * zeal))
        system = prompts[min(int(rng.paretovariate(1.0)) - 1, 4)]

        def pause(child: Random = child) -> float:
            return child.expovariate(1 / 300) if child.random() < 0.1 else child.expovariate(1 / 20)

        at += rng.expovariate(0.5)
        made += turns
        yield Arrival(at, chat(child, system, turns, pause))


def agent(rng: Random, system: list[int], turns: int, depth: int = 0) -> Client:
    """Run an agent for `turns` turns, which sometimes forks a sub-agent.

    A turn is a short tool call, then a result of up to thousands of tokens.
    """
    talk = Talk(system, "", [len(system)])
    talk.say(text(rng, 10, 60))
    for _ in range(turns):
        talk.hear((yield talk.ask(rng.expovariate(1 / 15), rng.randint(3, 14))))
        if depth == 0 and rng.random() < 0.05:
            yield from fork(rng, talk)
        talk.say(text(rng, 60, 260) if rng.random() < 0.3 else text(rng, 4, 40))


def fork(rng: Random, talk: Talk) -> Client:
    """Run a sub-agent that continues from the conversation `talk`, which stays unchanged."""
    other = Talk(talk.tokens, talk.salt, list(talk.ends))
    other.say(text(rng, 4, 20))
    for _ in range(rng.randint(3, 8)):
        other.hear((yield other.ask(rng.expovariate(1 / 15), rng.randint(3, 14))))
        other.say(text(rng, 4, 60))


def agents(rng: Random, requests: int) -> Iterator[Arrival]:
    systems = [text(rng, 200, 400) for _ in range(3)]
    at, made = 0.0, 0
    while made < requests:
        turns = rng.randint(10, 60)
        at += rng.expovariate(1 / 3)
        made += turns
        yield Arrival(at, agent(Random(rng.random()), rng.choice(systems), turns))


def editor(rng: Random, system: list[int], turns: int) -> Client:
    """Regenerate an answer or edit an earlier message in half of the turns, and continue in the other turns."""
    talk = Talk(system, "", [len(system)])
    for _ in range(turns):
        if len(talk.ends) > 2 and rng.random() < 0.5:
            back = rng.choice([1, 1, 1, 2, 3])
            ends = talk.ends[: max(1, len(talk.ends) - 2 * back + rng.randint(0, 1))]
            talk = Talk(talk.tokens[: ends[-1]], talk.salt, ends)
        if len(talk.ends) % 2:
            talk.say(text(rng, 2, 12))
        talk.hear((yield talk.ask(rng.expovariate(1 / 15), rng.randint(4, 24))))


def regenerate_and_edit(rng: Random, requests: int) -> Iterator[Arrival]:
    system = text(rng, 30, 60)
    at, made = 0.0, 0
    while made < requests:
        turns = rng.randint(3, 25)
        at += rng.expovariate(2.5)
        made += turns
        yield Arrival(at, editor(Random(rng.random()), system, turns))


def once(tokens: list[int], answer: int, pause: float = 0.0, salt: str = "") -> Client:
    yield Ask(pause, tokens, answer, (len(tokens),), salt)


def best_of_n(rng: Random, requests: int) -> Iterator[Arrival]:
    """Send the same prompt eight times at once; some clients continue as a search, with their answers as prompts."""
    at, made = 0.0, 0
    few_shot = text(rng, 60, 100)
    while made < requests:
        prompt = few_shot + text(rng, 20, 100)
        at += rng.expovariate(1 / 2)
        for _ in range(8):
            made += 1
            yield Arrival(at, search(Random(rng.random()), prompt, rng.choice([0, 0, 1, 2])))
            made += 2


def search(rng: Random, prompt: list[int], levels: int) -> Client:
    tokens = prompt
    for _ in range(levels + 1):
        answer = yield Ask(
            rng.expovariate(1 / 10) if tokens is not prompt else 0.0, tokens, rng.randint(4, 30), (len(prompt),)
        )
        tokens = tokens + answer


def pollution(rng: Random, requests: int) -> Iterator[Arrival]:
    """Mix chats with equally many requests of retrieval, whose long contexts are never reused."""
    yield from merged(
        chats_at_random(Random(rng.random()), requests // 2),
        contexts(Random(rng.random()), requests // 2, 0.4),
    )


def contexts(rng: Random, count: int, gap: float, salt: str = "") -> Iterator[Arrival]:
    at = 0.0
    for _ in range(count):
        at += rng.expovariate(1 / gap)
        yield Arrival(at, once(text(rng, 100, 500), rng.randint(2, 10), salt=salt))


def batch_scan(rng: Random, requests: int) -> Iterator[Arrival]:
    """Mix chats with thousands of unique prompts, which arrive about as fast as they are answered."""
    yield from merged(
        chats_at_random(Random(rng.random()), requests // 2), contexts(Random(rng.random()), requests // 2, 0.18)
    )


def tenants(rng: Random, requests: int) -> Iterator[Arrival]:
    """Mix two API keys: one chats, the other sends unique prompts."""
    mine = (
        Arrival(arrival.at, salted(arrival.client, "chats"))
        for arrival in chats_at_random(Random(rng.random()), requests // 3)
    )
    yield from merged(mine, contexts(Random(rng.random()), requests * 2 // 3, 0.3, "scan"))


def salted(client: Client, salt: str) -> Client:
    answer: Answer | None = None
    while True:
        try:
            ask = client.send(answer) if answer is not None else next(client)
        except StopIteration:
            return
        answer = yield Ask(ask.pause, ask.tokens, ask.answer, ask.ends, salt)


def merged(*streams: Iterator[Arrival]) -> Iterator[Arrival]:
    """Merge arrivals in order of time."""
    heads = [(stream, next(stream, None)) for stream in streams]
    while any(head is not None for _, head in heads):
        at = min(
            range(len(heads)), key=lambda index: head.at if (head := heads[index][1]) is not None else float("inf")
        )
        stream, head = heads[at]
        assert head is not None
        yield head
        heads[at] = (stream, next(stream, None))


WORKLOADS: dict[str, Workload] = {
    "chats in turns": Workload(chats_in_turns),
    "chats at random": Workload(chats_at_random),
    "agents": Workload(agents),
    "regenerate and edit": Workload(regenerate_and_edit),
    "best of n and search": Workload(best_of_n),
    "pollution": Workload(pollution),
    "batch scan": Workload(batch_scan),
    "tenants": Workload(tenants),
}
