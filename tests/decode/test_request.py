"""Arguments of both loops: one validation, and errors that name sequence, argument and value."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.fake_model import fake_model
from helpers.small import TARGET as NETWORK
from helpers.small import VOCAB, keys, provider

import jaxspec as js
from jaxspec.decode import BatchState, CachedNetwork, CompiledDecoder, Decoder, Options, Request
from jaxspec.draft import Lookup, NoDraft
from jaxspec.models import CacheError, Provider

KEY = jax.random.key(0)
PLAIN = Decoder(provider(0.0, 1.0), max_context=40)
BATCH = CompiledDecoder(NETWORK, max_context=40, prefill_width=4)

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.0, 1.5, -0.5, math.nan, math.inf, 2**31, 2**64, 2**70),
    *(10**400, 1j, "", "2", "token", b"x", [], [1], (1, 0), (-1,), (1.5,), ("a",), [True], [None]),
    *({}, {1: 2}, set(), {1}, {1.5}, frozenset(["a", 1]), iter([1]), range(2), [[1], [1, 2]]),
    *(
        np.array(1),
        np.array([1, 2]),
        np.array([[1]]),
        np.array([1.5]),
        np.array(["a"]),
        np.bool_(1),
    ),
    *(np.float32(2), np.ma.array([1, 2], mask=[0, 1]), jnp.array([1]), KEY, jax.random.PRNGKey(0)),
    *(object(), int, Provider, js.Rule, len, NoDraft, NoDraft(), PLAIN, NETWORK, jnp.float32(0.5)),
]
OPTIONS = tuple(Options.__annotations__)

ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    **{
        f"Decoder({name})": lambda x, name=name: Decoder(**{"target": PLAIN.target, name: x})
        for name in ("target", "drafter", "bonus", "max_context")
    },
    **{
        f"CompiledDecoder({name})": lambda x, name=name: CompiledDecoder(
            **{"target": NETWORK, name: x}
        )
        for name in ("target", "drafter", "bonus", "max_context", "prefill_width", "draws")
    },
    **{
        f"start({name})": lambda x, name=name: PLAIN.start([0], KEY, **{name: x})
        for name in OPTIONS
    },
    **{
        f"batch start({name})": lambda x, name=name: BATCH.start([[0], [1]], keys(2), **{name: x})
        for name in OPTIONS
    },
    "start(prompt)": lambda x: PLAIN.start(x, KEY),
    "start(key)": lambda x: PLAIN.start([0], x),
    "batch start(prompts)": lambda x: BATCH.start(x, KEY),
    "batch start(prompt)": lambda x: BATCH.start([[0], x], keys(2)),
    "batch start(keys)": lambda x: BATCH.start([[0], [1]], x),
    "step": PLAIN.step,
    "resume": PLAIN.resume,
    "rounds": lambda x: list(PLAIN.rounds(x)),
    "advance": BATCH.advance,
    "lower": lambda x: None if x in (1, True) else BATCH.lower(x),
    "CachedNetwork(model)": lambda x: CachedNetwork(x, slots=8),
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_an_odd_argument_is_taken_or_a_value_error_of_one_line(argument: str) -> None:
    for value in ODD:
        if argument == "lower" and not isinstance(value, str | float | None):
            continue
        try:
            ARGUMENTS[argument](value)
        except ValueError as error:
            assert 0 < len(str(error)) < 700, (value, error)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt is []: must be a sequence of at least one token"),
    ({"prompt": {1}}, "prompt is {1}: must be a sequence of at least one token"),
    ({"prompt": 5}, "prompt is 5: must be a sequence of token ids"),
    ({"prompt": "12"}, "prompt is '12': must be a sequence of token ids"),
    ({"prompt": [1, 5]}, "prompt: entry 1 is 5: must be an integer in the vocabulary of 5"),
    ({"prompt": [-1]}, "prompt: entry 0 is -1: must be an integer in the vocabulary of 5"),
    ({"prompt": [0.5]}, "prompt: entry 0 is 0.5: must be an integer"),
    ({"prompt": [True, 2]}, "prompt: entry 0 is True: must be an integer"),
    ({"prompt": [1, [2]]}, "prompt: entry 1 is [2]: must be an integer"),
    ({"prompt": np.ma.array([1, 2], mask=[0, 1])}, "prompt: entry 1 is None: must be an integer"),
    ({"prompt": [1] * 41}, "prompt has 41 tokens, max_context is 40"),
    ({"new_tokens": 0}, "new_tokens is 0: must be an integer, at least 1"),
    ({"new_tokens": 1.5}, "new_tokens is 1.5: must be an integer, at least 1"),
    ({"new_tokens": True}, "new_tokens is True: must be an integer"),
    ({"new_tokens": None}, "new_tokens is None: must be an integer"),
    ({"temperature": -1.0}, "temperature is -1.0: must be finite and at least 0"),
    ({"temperature": math.nan}, "temperature is nan: must be finite and at least 0"),
    ({"temperature": 1e39}, "temperature is 1e+39: must be finite and at least 0"),
    ({"temperature": "0.5"}, "temperature is '0.5': must be finite and at least 0"),
    ({"top_k": -2}, "top_k is -2: must be an integer, at least 1; None, 0 or -1 keep all tokens"),
    ({"top_k": 2.0}, "top_k is 2.0: must be an integer"),
    ({"top_p": 0}, "top_p is 0: must be above 0 and at most 1"),
    ({"top_p": 1.5}, "top_p is 1.5: must be above 0 and at most 1"),
    ({"top_p": None}, "top_p is None: must be above 0 and at most 1"),
    ({"min_p": 1.5}, "min_p is 1.5: must be from 0 to 1"),
    ({"logit_bias": 2}, "logit_bias is 2: must be a mapping from token ids to nats"),
    ({"logit_bias": {5: 1.0}}, "logit_bias: entry 0 is 5: must be an integer in the vocabulary"),
    ({"logit_bias": {1: -math.inf}}, "logit_bias: token 1 is -inf: must be a finite number of"),
    ({"allowed_tokens": []}, "allowed_tokens is []: must be at least one token, or None for all"),
    ({"allowed_tokens": [1.5]}, "allowed_tokens: entry 0 is 1.5: must be an integer"),
    ({"frequency_penalty": math.inf}, "frequency_penalty is inf: must be a finite number of nats"),
    ({"presence_penalty": None}, "presence_penalty is None: must be a finite number of nats"),
    ({"stop_tokens": 2}, "stop_tokens is 2: must be a sequence of token ids"),
    ({"stop_tokens": np.array(3)}, "stop_tokens is array(3): must be a sequence of token ids"),
    ({"stop_tokens": {1: 2}}, "stop_tokens is {1: 2}: must be a sequence of token ids"),
    ({"stop_tokens": [1.5]}, "stop_tokens: entry 0 is 1.5: must be an integer"),
    ({"stop_tokens": [1, True]}, "stop_tokens: entry 1 is True: must be an integer"),
    ({"stop_tokens": [5]}, "stop_tokens: entry 0 is 5: must be an integer in the vocabulary of 5"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_bad_argument_is_named_with_its_value_in_a_batch_with_its_sequence(
    change: dict[str, Any], message: str
) -> None:
    good: dict[str, Any] = {"new_tokens": 2, "temperature": 1, "top_k": 2, "top_p": 1}
    good |= {"stop_tokens": [], "min_p": 0, "logit_bias": {}, "allowed_tokens": None}
    good |= {"frequency_penalty": 0, "presence_penalty": 0}
    options = dict(change)
    prompt = options.pop("prompt", [1])
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        PLAIN.start(prompt, KEY, **options)
    columns = {name: [good[name], value] for name, value in options.items()}
    with pytest.raises(ValueError, match="^sequence 1: " + re.escape(message)):
        BATCH.start([[1], prompt], keys(2), **columns)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "prompts is []: must be a sequence of at least one prompt"),
        ({"prompts": 5}, "prompts is 5: must be a sequence of at least one prompt"),
        ({"prompts": [1, 2]}, "prompts is [1, 2]: must be a sequence of prompts: put a single one"),
        ({"prompts": iter([[1], [2]])}, ": must be a sequence of at least one prompt"),
        ({"new_tokens": [1, 2, 3]}, "new_tokens is [1, 2, 3]: must be one value for all sequences"),
        ({"temperature": {0.5, 1.0}}, "must be one value for all sequences, or one for each of 2"),
        (
            {"stop_tokens": [[0]]},
            "stop_tokens is [[0]]: must be one value for all sequences, or one",
        ),
        (
            {"stop_tokens": [0, 1, 2, 3, 4]},
            "sequence 0: stop_tokens are 5 tokens, there is room",
        ),
        (
            {"keys": KEY},
            "must be 2 typed keys, jax.random.split(jax.random.key(seed), 2)",
        ),
        ({"keys": jax.random.PRNGKey(0)}, "must be 2 typed keys"),
    ],
)
def test_a_bad_argument_of_a_batch_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"prompts": [[1], [2]], "keys": keys(2)} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        BATCH.start(arguments.pop("prompts"), arguments.pop("keys"), **arguments)


@pytest.mark.parametrize("key", [0, None, jax.random.PRNGKey(0), keys(2)])
def test_a_key_that_is_not_one_typed_key_is_an_error(key: Any) -> None:
    for start in (PLAIN.start, lambda prompt, key: BATCH.start([prompt], key)):
        with pytest.raises(ValueError, match=r"key is .*: must be one typed key, jax\.random\.key"):
            start([0], key)


def request_of(**options: Any) -> Request:
    return PLAIN.start([1], KEY, **options).request


def test_arguments_of_every_type_of_numbers_are_taken() -> None:
    for stops in ({1}, [1, 1], (1,), np.array([1]), frozenset([np.int64(1)]), range(1, 2)):
        assert request_of(stop_tokens=stops) == request_of(stop_tokens=[1])
    assert request_of(top_k=0) == request_of(top_k=-1) == request_of(top_k=VOCAB) == request_of()
    assert request_of(temperature=jnp.float32(0.5)) == request_of(temperature=np.float16(0.5))
    assert request_of(new_tokens=np.uint64(2**64 - 1)).new_tokens == 2**31 - 1
    for prompt in (np.array([1], np.int64), jnp.array([1]), (np.uint8(1),), [jnp.int32(1)]):
        assert PLAIN.start(prompt, KEY).request == request_of()
        state = BATCH.start([prompt], KEY, temperature=[0.5], top_k=[None], stop_tokens=[{1}])
        assert state.tokens[0, :1].tolist() == [1]


def test_one_value_is_for_all_sequences_of_a_batch() -> None:
    def arrays(state: BatchState) -> list[list[Any]]:
        parts = (state.limit, state.stop_tokens, state.sampling)
        return [x.tolist() for x in jax.tree.leaves(parts)]

    one = {"new_tokens": 3, "stop_tokens": [4, 1], "temperature": 0.5, "top_k": 2, "top_p": 0.5}
    each = {name: [value, value] for name, value in one.items()}
    states = [BATCH.start([[1], [2, 2]], keys(2), **options) for options in (one, each)]  # type: ignore[arg-type]
    assert arrays(states[0]) == arrays(states[1])
    assert states[0].limit.tolist() == [4, 5]
    assert states[0].stop_tokens.tolist() == [[1, 4, -1, -1]] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CompiledDecoder(NETWORK, max_context=1.5), "max_context is 1.5: must be a"),
        (lambda: CompiledDecoder(NETWORK, max_context=math.nan), "max_context is nan"),
        (lambda: CompiledDecoder(NETWORK, prefill_width=True), "prefill_width is True"),
        (lambda: CompiledDecoder(NETWORK, max_stop_tokens=0), "max_stop_tokens is 0"),
        (lambda: CompiledDecoder(NETWORK, bonus=2), "bonus is 2: must be True or False"),
        (lambda: CompiledDecoder(NETWORK, draws=KEY), "draws is of type"),
        (lambda: CompiledDecoder(PLAIN.target), "target is of type Provider: must be a"),
        (lambda: Decoder(NETWORK), "target is of type LanguageModel: must be a"),
        (lambda: Decoder("llama"), "target is 'llama', of type str: must be a"),
        (lambda: Decoder(PLAIN.target, max_context=0), "max_context is 0"),
        (lambda: Decoder(PLAIN.target, bonus=1), "bonus is 1: must be True or False"),
        (lambda: PLAIN.step(None), "state is None: must be a DecodeState"),
        (lambda: BATCH.advance(None), "state is None: must be a BatchState"),
        (lambda: BATCH.lower("x"), "batch is 'x': must be a"),
    ],
)
def test_what_is_of_another_kind_is_named_with_what_to_give_instead(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_a_network_made_for_fewer_positions_than_max_context_is_an_error() -> None:
    short = fake_model(VOCAB, name="short", max_context=30)
    with pytest.raises(CacheError, match="max_context is 40, but short was made for 30 positions"):
        CompiledDecoder(short, Lookup(), max_context=40)
