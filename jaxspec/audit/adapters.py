"""Samplers of serving engines as foreign verifiers: arrays in their layout, tokens back.

Each adapter takes a function with an engine's arguments and returns a `verify` that an audit of
foreign verifiers calls, for one sequence or, where the arrays have a leading axis, for a batch. The
audited sequences are placed among others of other lengths, shorter and longer, so that offsets into a
batch matter and tokens after a sequence's own can be mistaken for its candidates.

Arrays are NumPy, or JAX for JAX keys, or torch for torch generators, as those that `verify` is given.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import extras
from jaxspec.audit.foreign import Adapted
from jaxspec.layouts import (
    FlatBatch,
    assisted_from_path,
    emitted_from_flat,
    emitted_from_linked,
    linked_from_tree,
)
from jaxspec.layouts.arrays import Array, library_of

Verify = Callable[..., Any]
BONUSES = ("ids", "rows", "none")


def from_flat(sample: Callable[..., Any], *, bonus: str = "ids") -> Verify:
    """Make a verifier of paths of a sampler of flat batches, such as vLLM's or tpu-inference's.

    `sample` is called by keyword and returns output_token_ids, int [B, max_spec_len + 1] or
    [total + B]: all entries but placeholders -1 are emitted, in their order. Arguments:

    - draft_token_ids int [total], num_draft_tokens and cu_num_draft_tokens int [B], max_spec_len int;
    - draft_probs float [total, V], or None for point masses;
    - target_probs float [total, V], or [total + B, V] with bonus="rows";
    - bonus_token_ids int [B, 1], only with bonus="ids";
    - randomness, a source for each sequence: [B, K] uniforms, [B] keys, or a list. A sampler that
      takes one source for a batch uses that of the audited sequence: randomness[1].

    Args:
      sample: the sampler.
      bonus: "ids": bonus tokens are drawn here, each from its row with a number taken from the
        sequence's source (the last of explicit uniforms), and handed over; "rows": the sampler draws
        them from bonus rows among the target rows; "none": it emits none.

    Returns:
      `verify(draft_tokens, draft_rows, target_rows, randomness)`, which returns int [T + 2] or
      [B, T + 2], -1 after the emitted tokens; max_spec_len is T + 1. It serves kind "path", and
      "point_mass_path" with draft rows None.

    Raises:
      ValueError: `bonus` is another word; in a call, the output has another shape.

    >>> def accepts_all(*, draft_token_ids, bonus_token_ids, **_):  # lossy
    ...     return np.concatenate([draft_token_ids, bonus_token_ids[:, 0]])
    >>> row = np.array([0.0, 1.0], np.float32)
    >>> from_flat(accepts_all)(np.array([0]), None, np.stack([row, row]), np.array([0.5])).tolist()
    [0, 1, -1]
    """
    if bonus not in BONUSES:
        raise ValueError(f"bonus is {bonus!r}: must be one of {', '.join(map(repr, BONUSES))}")

    def verify(draft_tokens: Any, draft_rows: Any, target_rows: Any, randomness: Any) -> Array:
        give = _giver(target_rows)
        arrays, sources, is_batch = _as_batch((draft_tokens, draft_rows, target_rows), randomness)
        (tokens, draft, target), library = arrays, library_of(arrays[2])
        num, size = tokens.shape
        arguments: dict[str, Any] = {"max_spec_len": size + 1}
        if bonus == "ids":
            sources, uniforms = _with_uniforms(sources, 1)
            ids = _pick(target[:, -1], uniforms)
            zero = 0 * ids[:1]
            arguments["bonus_token_ids"] = library.concatenate([zero, ids, zero, zero])
        has_bonus_rows = bonus == "rows"
        first = target[0, :1]
        best = library.argmax(first, axis=1).astype(tokens.dtype)
        lengths = 1, *[size] * num, 0, size + 1

        # Before the audited sequences comes one of one token, after them one of none, one of T + 1.
        def among(values: Array, other: Array, more: int = 0) -> Array:
            flat = values.reshape(-1, *values.shape[2:])
            before, after = [other] * (1 + more), [other] * (more + size + 1 + more)
            return library.concatenate([*before, flat, *after])

        batch = FlatBatch(
            draft_token_ids=among(tokens, best),
            num_draft_tokens=library.asarray(lengths, dtype=np.int32),
            draft_rows=None if draft is None else among(draft, first),
            target_rows=among(target[:, : size + has_bonus_rows], first, int(has_bonus_rows)),
            has_bonus_rows=has_bonus_rows,
        )
        arguments |= {
            "draft_token_ids": batch.draft_token_ids,
            "num_draft_tokens": batch.num_draft_tokens,
            "cu_num_draft_tokens": batch.cu_num_draft_tokens,
            "draft_probs": batch.draft_rows,
            "target_probs": batch.target_rows,
        }
        if isinstance(sources, list):
            sources = [sources[0], *sources, *sources[:1] * 2]
        else:
            sources = library_of(sources).concatenate([sources[:1], sources, *[sources[:1]] * 2])
        output = sample(**{name: give(x) for name, x in arguments.items()}, randomness=sources)
        emitted = emitted_from_flat(batch, _plain(output), arguments["max_spec_len"])[1:-2]
        return emitted if is_batch else emitted[0]

    return Adapted(verify, own_uniforms=int(bonus == "ids"))


def from_transformers(sample: Callable[..., Any], *, prompt: Sequence[int] = (0,)) -> Verify:
    """Make a verifier of paths of transformers' `_speculative_sampling`, or of a function like it.

    `sample` is called by keyword and returns (valid_tokens int [1, n + 1], n_matches n). Arguments:

    - candidate_input_ids int [1, L + T], candidate_logits float [1, T, V], candidate_length T,
      new_logits float [1, T + 1, V]: the logits are the logarithms of the rows;
    - is_done_candidate, False, if the function has such an argument (it had until transformers 5);
    - randomness, a JAX key, a NumPy generator or uniforms. For a seed or a torch generator there is no
      such argument: the arrays are torch's, on the CPU, and the global generator of torch, which
      transformers draws from, is seeded before the call and restored after it.

    Args:
      sample: the function.
      prompt: int [L], the tokens before the candidates.

    Returns:
      `verify(draft_tokens, draft_rows, target_rows, randomness)`, which returns int [n + 1]. It serves
      kind "path" in single sequences.

    Raises:
      ImportError: in a call with a seed or a torch generator, torch is not installed.
      ValueError: in a call, draft rows are None, or n_matches is not the number of tokens less one.
    """
    had_flag = "is_done_candidate" in inspect.signature(sample).parameters
    flags = {"is_done_candidate": False} if had_flag else {}

    def verify(draft_tokens: Any, draft_rows: Any, target_rows: Any, randomness: Any) -> Array:
        tokens, draft, target = map(_plain, (draft_tokens, draft_rows, target_rows))
        names = "candidate_input_ids", "candidate_logits", "new_logits"
        arrays = dict(zip(names, assisted_from_path((tokens, draft, target), prompt), strict=True))
        size = len(tokens)
        if not _is_torch(randomness) and not isinstance(randomness, int | np.integer):
            found = sample(**arrays, candidate_length=size, randomness=randomness, **flags)
        else:
            torch = extras.require("an audit of torch code", "torch", "parity")
            seed = randomness
            if _is_torch(seed):
                seed = torch.randint(2**62, (), generator=randomness)
            arrays = {name: torch.as_tensor(value) for name, value in arrays.items()}
            arrays[names[0]] = arrays[names[0]].long()
            shared = torch.default_generator
            state = shared.get_state()
            try:
                # Of the CPU alone: torch.manual_seed takes far longer than a round.
                shared.manual_seed(int(seed))
                with torch.no_grad():
                    found = sample(**arrays, candidate_length=size, **flags)
            finally:
                shared.set_state(state)
        emitted, matches = _plain(found[0])[0], int(found[1])
        if len(emitted) != matches + 1:
            raise ValueError(
                f"n_matches is {matches}: must be one less than the {len(emitted)} tokens"
            )
        return emitted

    return verify


def from_linked_list(sample: Callable[..., Any]) -> Verify:
    """Make a verifier of trees of a sampler of linked-list trees, such as sglang's.

    `sample` is called by keyword and returns what sglang's kernel writes: (predicts int [B N],
    accept_index int [B, num_speculative_tokens], accept_token_num int [B]). Arguments:

    - candidates, retrive_index, retrive_next_token, retrive_next_sibling int [B, N]. Candidate 0 is
      the root; retrive_index counts through the batch.
    - uniform_samples float [B, N], uniform_samples_for_final_sampling float [B]: N + 1 numbers taken
      from each sequence's source, of explicit uniforms the last ones in this order;
    - target_probs float [B, N, V]; draft_probs as target_probs, None for point masses;
    - num_speculative_tokens int, N: room for the root and the longest path.

    Args:
      sample: the sampler.

    Returns:
      `verify(tokens, parents, draft_rows, target_rows, randomness)`, which returns (emitted tokens
      int [N], accepted nodes int [N - 1]), or both with a leading [B], -1 after them.

    Raises:
      ValueError: in a call, fewer than N + 1 uniforms are given.
    """

    def verify(
        tokens: Any, parents: Any, draft_rows: Any, target_rows: Any, randomness: Any
    ) -> tuple[Array, Array]:
        give, given = _giver(target_rows), (tokens, parents, target_rows, draft_rows)
        arrays, sources, is_batch = _as_batch(given, randomness)
        num = arrays[0].shape[1]
        _, coins = _with_uniforms(sources, num + 1)

        # The audited sequences are placed between two copies of the first, with coins of 1/2.
        def among(values: Array, other: Array) -> Array:
            return library_of(values).concatenate([other, values, other])

        tokens, parents, target, draft = (None if x is None else among(x, x[:1]) for x in arrays)
        coins = among(coins, library_of(coins).full_like(coins[:1], 0.5))
        first = num * np.arange(len(tokens), dtype=np.int32)
        linked = _each(linked_from_tree, tokens, parents, first)
        arguments = {field.name: getattr(linked, field.name) for field in fields(linked)}
        arguments |= {
            "uniform_samples": coins[:, :-1],
            "uniform_samples_for_final_sampling": coins[:, -1],
            "target_probs": target,
            "draft_probs": draft,
            "num_speculative_tokens": num,
        }
        found = sample(**{name: give(value) for name, value in arguments.items()})
        predicts, index, accepted = map(_plain, found)

        def emitted(index: Array, accepted: Array, first: Array) -> tuple[Array, Array]:
            tokens, slots = emitted_from_linked(predicts, index, accepted)
            return tokens, library_of(slots).where(slots >= 0, slots - first, slots)

        both = _each(emitted, index[1:-1], accepted[1:-1], first[1:-1])
        return both if is_batch else (both[0][0], both[1][0])

    return Adapted(verify, own_uniforms=1)


def _as_batch(arrays: Sequence[Any], randomness: Any) -> tuple[list[Any], Any, bool]:
    """Return (arrays with a leading axis, as many sources, whether they were a batch already)."""
    plain = [*map(_plain, arrays)]
    if plain[0].ndim == 2:
        is_array = isinstance(randomness, jax.Array | np.ndarray)
        return plain, randomness if is_array else list(randomness), True
    is_array = isinstance(randomness, jax.Array | np.ndarray)
    sources = randomness[None] if is_array else [randomness]
    return [None if x is None else x[None] for x in plain], sources, False


def _each(function: Callable[..., Any], *arrays: Array) -> Any:
    """Call a function for each sequence of a batch, and stack the results."""
    if isinstance(arrays[0], jax.Array):
        return jax.vmap(function)(*arrays)
    results = [function(*each) for each in zip(*arrays, strict=True)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *results)


def _pick(rows: Array, uniforms: Array) -> Array:
    """Return the token that each uniform [B, 1] picks from its row [B, V] by inverse CDF, [B, 1]."""
    running = rows.cumsum(axis=1)
    is_before = running[:, :-1] <= uniforms * running[:, -1:]
    return is_before.sum(axis=1, keepdims=True, dtype=np.int32)


def _is_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def _plain(value: Any) -> Any:
    """Return an array of torch as one of NumPy, other values as they are."""
    return value.cpu().numpy() if _is_torch(value) else value


def _giver(example: Any) -> Callable[[Any], Any]:
    """Return what turns arrays of NumPy or JAX into those that a verifier was given."""
    if not _is_torch(example):
        return lambda value: value
    torch = extras.require("an audit of torch code", "torch", "parity")
    return lambda value: torch.as_tensor(value) if isinstance(value, np.ndarray) else value


def _with_uniforms(sources: Any, num: int) -> tuple[Any, Array]:
    """Take uniforms float32 [B, num] from a batch of sources: (what is left of these, uniforms)."""
    if isinstance(sources, list):
        return sources, np.stack([_drawn(source, num) for source in sources])
    is_typed = jax.dtypes.issubdtype(sources.dtype, jax.dtypes.prng_key)
    if is_typed or sources.dtype == np.uint32:
        left, own = jnp.moveaxis(jax.vmap(jax.random.split)(sources), 1, 0)
        return left, jax.vmap(lambda key: jax.random.uniform(key, (num,)))(own)
    if sources.shape[1] < num:
        raise ValueError(
            f"randomness has {sources.shape[1]} uniforms: {num} are taken here; set num_uniforms"
        )
    split = sources.shape[1] - num
    return sources[:, :split], sources[:, split:]


def _drawn(source: Any, num: int) -> np.ndarray:
    """Draw uniforms float32 [num] from a generator or for a seed."""
    if _is_torch(source):
        torch = extras.require("an audit of torch code", "torch", "parity")
        return torch.rand(num, generator=source).numpy()
    is_generator = isinstance(source, np.random.Generator)
    # Apart from what a sampler draws with the seed itself.
    generator = source if is_generator else np.random.default_rng((int(source), 1))
    return generator.random(num, dtype=np.float32)
