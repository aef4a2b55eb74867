"""Samplers of serving engines as foreign verifiers: arrays in their layout, tokens back.

Each adapter takes a function with an engine's arguments and returns a `verify` that an audit of
foreign verifiers calls, for one sequence or, where the arrays have a leading axis, for a batch. The
audited sequences are placed among others of other lengths, so that offsets into a batch matter.

Arrays are NumPy, or JAX for JAX keys, or torch for torch generators, as those that `verify` is given.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import extras
from jaxspec.layouts import (
    assisted_from_path,
    emitted_from_flat,
    emitted_from_linked,
    flat_from_paths,
    linked_from_tree,
)
from jaxspec.layouts.arrays import Array, Path, library_of

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
      `verify(draft_tokens, draft_rows, target_rows, randomness)`, which returns int [T + 1] or
      [B, T + 1], -1 after the emitted tokens. It serves kind "path", and "point_mass_path" with draft
      rows None.

    Raises:
      ValueError: `bonus` is another word; in a call, the output has another shape.

    >>> def greedy(*, draft_token_ids, target_probs, bonus_token_ids, **_):  # paths of one token
    ...     best = target_probs.argmax(axis=1)  # tokens of all sequences, then bonus tokens
    ...     ids = np.where(draft_token_ids == best, bonus_token_ids[[0, 1, 3], 0], -1)
    ...     return np.concatenate([best, ids[:2], bonus_token_ids[2], ids[2:]])
    >>> row = np.array([0.0, 1.0], np.float32)
    >>> from_flat(greedy)(np.array([1]), None, np.stack([row, row]), np.array([0.5])).tolist()
    [1, 1]
    """
    if bonus not in BONUSES:
        raise ValueError(f"bonus is {bonus!r}: must be one of {', '.join(map(repr, BONUSES))}")

    def verify(draft_tokens: Any, draft_rows: Any, target_rows: Any, randomness: Any) -> Array:
        give = _giver(target_rows)
        tokens, draft, target = map(_plain, (draft_tokens, draft_rows, target_rows))
        is_batch = tokens.ndim == 2
        paths, sources = [(tokens, draft, target)], [randomness]
        if is_batch:
            sources = list(randomness)
            paths = [
                (tokens[b], None if draft is None else draft[b], target[b])
                for b in range(len(sources))
            ]
        arguments = {}
        if bonus == "ids":
            sources, uniforms = map(list, zip(*map(_with_uniform, sources), strict=True))
            ids = [_pick(path[2][-1], u) for path, u in zip(paths, uniforms, strict=True)]
            ids = _among(ids, [ids[0] * 0] * 3)
            arguments["bonus_token_ids"] = library_of(target).stack(ids)[:, None]
        others = _others(paths[0])
        batch = flat_from_paths(_among(paths, others), has_bonus_rows=bonus == "rows")
        arguments |= {
            "draft_token_ids": batch.draft_token_ids,
            "num_draft_tokens": batch.num_draft_tokens,
            "cu_num_draft_tokens": batch.cu_num_draft_tokens,
            "draft_probs": batch.draft_rows,
            "target_probs": batch.target_rows,
        }
        longest = max(tokens.shape[-1], 1)
        output = sample(
            **{name: give(value) for name, value in arguments.items()},
            max_spec_len=longest,
            randomness=_joined(_among(sources, sources[:1] * 3)),
        )
        emitted = emitted_from_flat(batch, _plain(output), longest)[1:-2]
        return emitted if is_batch else emitted[0]

    return verify


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
      from each sequence's source, from explicit uniforms in this order;
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
        give = _giver(target_rows)
        arrays = [*map(_plain, (tokens, parents, target_rows, draft_rows))]
        is_batch, sources = arrays[0].ndim == 2, randomness
        if not is_batch:
            arrays = [None if x is None else x[None] for x in arrays]
            sources = [randomness]
        # The audited sequences are placed between two copies of the first, with coins of 1/2.
        library, num = library_of(arrays[2]), arrays[0].shape[1]
        tokens, parents, target, draft = (
            None if x is None else library.concatenate([x[:1], x, x[:1]]) for x in arrays
        )
        coins = library.stack([_uniforms(source, num + 1) for source in sources])
        half = library.full_like(coins[:1], 0.5)
        coins = library.concatenate([half, coins, half])
        linked = [linked_from_tree(tokens[b], parents[b], b * num) for b in range(len(tokens))]
        names = "candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling"
        arguments = {name: library.stack([getattr(x, name) for x in linked]) for name in names}
        arguments |= {
            "uniform_samples": coins[:, :-1],
            "uniform_samples_for_final_sampling": coins[:, -1],
            "target_probs": target,
            "draft_probs": draft,
        }
        found = sample(
            **{name: give(value) for name, value in arguments.items()}, num_speculative_tokens=num
        )
        predicts, index, accepted = map(_plain, found)
        emitted, slots = [], []
        for b in range(1, len(linked) - 1):
            out, kept = emitted_from_linked(predicts, index[b], accepted[b])
            emitted.append(out)
            slots.append(library.where(kept >= 0, kept - b * num, kept))
        both = library.stack(emitted), library.stack(slots)
        return both if is_batch else (both[0][0], both[1][0])

    return verify


def _among(audited: list[Any], others: list[Any]) -> list[Any]:
    """Place the audited sequences among three others, one before them and two after."""
    return [others[0], *audited, *others[1:]]


def _others(path: Path) -> list[Path]:
    """Return paths of one, no and one token, with the first target row of a path."""
    tokens, draft, target = path
    library, rows = library_of(target), target[:1]
    best = library.argmax(rows, axis=1).astype(tokens.dtype)
    short = best, None if draft is None else rows, library.concatenate([rows, rows])
    return [short, (tokens[:0], None if draft is None else draft[:0], rows), short]


def _pick(row: Array, uniform: Any) -> Array:
    """Return the token that a uniform picks from a row by inverse CDF."""
    library, running = library_of(row), row.cumsum()
    place = library.searchsorted(running[:-1], uniform * running[-1], side="right")
    return library.asarray(place, dtype=np.int32)


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
    return lambda value: None if value is None else torch.as_tensor(value)


def _with_uniform(source: Any) -> tuple[Any, Any]:
    """Take one uniform from a source: (what is left of it, the uniform)."""
    if _is_key(source):
        key, own = jax.random.split(source)
        return key, jax.random.uniform(own)
    if isinstance(source, jax.Array | np.ndarray):
        return source[:-1], source[-1]
    return source, _uniforms(source, 1, 1)[0]


def _uniforms(source: Any, num: int, stream: int = 0) -> Array:
    """Return uniforms float32 [num] of a source; `stream` separates those of one seed."""
    if _is_key(source):
        return jax.random.uniform(source, (num,))
    if isinstance(source, jax.Array | np.ndarray):
        if len(source) < num:
            raise ValueError(f"randomness has {len(source)} uniforms: this sampler needs {num}")
        return source[:num]
    if _is_torch(source):
        torch = extras.require("an audit of torch code", "torch", "parity")
        return torch.rand(num, generator=source).numpy()
    is_generator = isinstance(source, np.random.Generator)
    generator = source if is_generator else np.random.default_rng((int(source), stream))
    return generator.random(num, dtype=np.float32)


def _is_key(source: Any) -> bool:
    is_array = isinstance(source, jax.Array)
    return is_array and (
        jax.dtypes.issubdtype(source.dtype, jax.dtypes.prng_key) or source.dtype == jnp.uint32
    )


def _joined(sources: Sequence[Any]) -> Any:
    """Return sources as one array, or as a list if they are objects or numbers."""
    first = sources[0]
    is_array = isinstance(first, jax.Array | np.ndarray)
    return library_of(first).stack(sources) if is_array else list(sources)
