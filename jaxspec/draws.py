"""Randomness as data: uniforms from a key, from a record, from a grid.

A verifier takes draws and never a key. One function then serves production (draws from a key),
replay (draws from a record), experiments and proofs (draws from a grid, under `vmap`). A round's key
is split once, by role (draft, accept, final), so that noise that chose a candidate takes no part in
its acceptance or its replacement.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import (
    DrawError,
    assert_array,
    assert_function,
    assert_kind,
    assert_whole,
    check_all,
    struct,
)
from jaxspec.tiles import is_uniform
from jaxspec.transfers import moves_data

THREEFRY = "threefry2x32"


@struct
class Draws:
    """The uniforms that one verification reads.

    Attributes:
      accept: float32 [N] in [0, 1), indexed by node; entry 0, the root's, is never used.
      final: float32 [2] in [0, 1), the pair that draws the replacement or bonus token: which tile of
        512 tokens, where inside it. Up to 512 tokens only the second number matters.
    """

    accept: jax.Array  # [N]
    final: jax.Array  # [2]


@struct
class RoundDraws:
    """The uniforms of one round, those of the draft kept apart from those of the verifier.

    Attributes:
      draft: float32 [N, 2] in [0, 1), a pair for each node, to draw its candidate with.
      verify: the uniforms that the verifier reads.
    """

    draft: jax.Array  # [N, 2]
    verify: Draws

    @moves_data
    def to_plain(self) -> dict[str, list]:
        """Return "draft", "accept" and "final" as lists of floats, which JSON keeps exactly."""
        fields = {"draft": self.draft, "accept": self.verify.accept, "final": self.verify.final}
        return {name: np.asarray(value).tolist() for name, value in fields.items()}

    @classmethod
    @moves_data
    def from_plain(cls, data: Mapping[str, Any]) -> "RoundDraws":
        """Rebuild a round's draws from stored numbers, bit for bit, for replay.

        Args:
          data: "draft" [N, 2], "accept" [N] and "final" [2], as lists or arrays. Each number must be
            exactly a float32 (JSON's decimal forms of float32 are), finite and in [0, 1).

        Raises:
          DrawError: naming the field, the entry and its value.

        >>> stored = {"draft": [[0, 0.5], [0, 0.25]], "accept": [0.0, 0.75], "final": [0.0, 0.5]}
        >>> RoundDraws.from_plain(stored).verify.accept.tolist()
        [0.0, 0.75]
        """
        draft, accept, final = (_uniforms(data, name) for name in ("draft", "accept", "final"))
        num_nodes = accept.shape[0] if accept.ndim == 1 else -1
        shapes = {"draft": (draft, (num_nodes, 2)), "accept": (accept, (num_nodes,))}
        for name, (given, shape) in {**shapes, "final": (final, (2,))}.items():
            if given.shape != shape:
                raise DrawError(f"draws: {name} has shape {given.shape}, must be {shape}")
        verify = Draws(accept=jnp.asarray(accept), final=jnp.asarray(final))
        return cls(draft=jnp.asarray(draft), verify=verify)


def _uniforms(data: Mapping[str, Any], name: str) -> np.ndarray:
    """Read one field of stored draws as float32."""
    if name not in data:
        raise DrawError(f"draws: field {name!r} is missing; the record has {sorted(data)}")
    try:
        given = np.asarray(data[name])
        if given.dtype.kind in "USbcmM":
            raise TypeError(f"its dtype is {given.dtype}")
        exact = given.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DrawError(f"draws: {name} is not an array of numbers: {error}") from error
    single = exact.astype(np.float32)
    for index in np.argwhere(~((exact >= 0) & (exact < 1) & (single < 1))):
        at = tuple(index.tolist())
        raise DrawError(f"draws: {name}{list(at)} is {exact[at]}, outside [0, 1)")
    return single


def round_draws(key: jax.Array, num_nodes: int, position: jax.Array | int = 0) -> RoundDraws:
    """Derive the draws of one round from a request's key.

    They depend on (key, position, node, role) and on nothing else: not on `num_nodes`, not on other
    requests, not on earlier rounds. Positions of successive roots increase strictly, so no draw is
    ever used twice.

    Args:
      key: a request's PRNG key, of any implementation; the draws are threefry of its words.
      num_nodes: N, including the root; T + 1 for a path of T drafted tokens.
      position: int32 [], position in the text of the round's root, at least 0.

    Returns:
      `RoundDraws` for N nodes.

    Raises:
      ValueError: `key` is not one key, or `num_nodes` or `position` is not an integer in range
        (under a trace the range of `position` is not checked).

    >>> import jax
    >>> draws = round_draws(jax.random.key(0), num_nodes=5, position=17)
    >>> draws.draft.shape, draws.verify.accept.shape, draws.verify.final.shape
    ((5, 2), (5,), (2,))
    """
    assert_whole("num_nodes", num_nodes, 1)
    key = jax.random.fold_in(_counter_key(key), _position_of(position))
    draft_key, accept_key, final_key = jax.random.split(key, 3)
    nodes = jnp.arange(num_nodes, dtype=jnp.int32)

    def at_node(role_key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(role_key, nodes)
        return jax.vmap(lambda k: jax.random.uniform(k, shape, jnp.float32))(keys)

    return RoundDraws(
        draft=at_node(draft_key, (2,)),
        verify=Draws(
            accept=at_node(accept_key, ()),
            final=jax.random.uniform(final_key, (2,), jnp.float32),
        ),
    )


DrawRound = Callable[[jax.Array, int, jax.Array], RoundDraws]
"""Makes the draws of a round of (key, number of nodes, position of the root), under a trace. A loop's
text has the target's law only if no draw that an earlier round has looked at is read again:
`round_draws` makes sure of that."""


def assert_draw_round(draws: Any) -> None:
    """Raise ValueError unless the argument `draws` is a function."""
    wanted = "a function of (key, number of nodes, root position), such as jaxspec.round_draws"
    assert_function("draws", draws, wanted)


def _position_of(position: Any) -> jax.Array:
    """Return a position as uint32; two different numbers must not share their draws."""
    if isinstance(position, jax.core.Tracer):
        if not jnp.issubdtype(position.dtype, jnp.integer) or position.shape:
            raise ValueError(f"position is {position}: must be one integer, the root's position")
        return position.astype(jnp.uint32)
    given = np.asarray(position)
    if given.dtype.kind not in "iu" or given.shape or not 0 <= int(given) < 2**32:
        raise ValueError(f"position is {position!r}: must be one integer from 0 to 2^32 - 1")
    return jnp.uint32(int(given))


def _counter_key(key: jax.Array) -> jax.Array:
    """Return a threefry key made of any key.

    Keys of the rbg implementations, the default on some machines, draw for a whole batch from its
    first key under `vmap`: the draws of a request would depend on others.
    """
    wanted = "one PRNG key, such as jax.random.key(seed)"
    assert_kind("key", key, jax.Array | np.ndarray, wanted)
    is_typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    if key.shape != () if is_typed else (key.ndim != 1 or key.dtype != jnp.uint32):
        raise ValueError(
            f"key is of dtype {key.dtype} and shape {list(key.shape)}: must be {wanted}; for a batch, "
            "map the call with jax.vmap"
        )
    key = key if is_typed else jax.random.wrap_key_data(jnp.asarray(key))
    kind = str(jax.random.key_impl(key))
    if kind == THREEFRY:
        return key
    words = jax.random.key_data(key)
    counter = jax.random.wrap_key_data(words[:2], impl=THREEFRY)
    counter = jax.random.fold_in(counter, zlib.crc32(kind.encode()))
    for word in words[2:]:
        counter = jax.random.fold_in(counter, word)
    return counter


def grid_points(num: int) -> np.ndarray:
    """Return the mid-points (i + 0.5) / num of `num` equal cells of [0, 1), float32.

    They are made on the host: under `jit` XLA turns a division by a constant into a product with its
    reciprocal, which moves points across cell edges.
    """
    return ((np.arange(num) + 0.5) / num).astype(np.float32)


def grid_chunks(sizes: Sequence[int], chunk: int) -> Iterator[np.ndarray]:
    """Yield a Cartesian grid of mid-points, float32 [chunk, axes], the last axis running fastest.

    `sizes` are the points of each axis; only the last chunk may be shorter.
    """
    axes = [grid_points(size) for size in sizes]
    total = int(np.prod([int(size) for size in sizes], dtype=np.int64))
    for start in range(0, total, chunk):
        cells = np.arange(start, min(start + chunk, total), dtype=np.int64)
        index = np.unravel_index(cells, tuple(sizes))
        yield np.stack([axis[i] for axis, i in zip(axes, index, strict=True)], axis=1)


def check_draws(draws: Draws) -> None:
    """Check under a trace that every draw is finite and in [0, 1)."""
    assert_array("draws.accept", draws.accept, {"N": None}, jnp.floating)
    assert_array("draws.final", draws.final, {"2": 2}, jnp.floating)
    message = " {value} is outside [0, 1)"
    check_all(is_uniform(draws.accept), "accept draw of node {i0}:" + message, value=draws.accept)
    check_all(is_uniform(draws.final), "final draw, number {i0}:" + message, value=draws.final)
