"""Custom drafters and rules: one class or function for the audit and both loops."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.small import DRAFT, LENGTH, PROMPTS, TARGET, VOCAB, provider

import jaxspec as js
from jaxspec import audit
from jaxspec.decode import CompiledDecoder, Decoder
from jaxspec.draft import Capacity, Drafter, FixedTree, Proposed, SampledPath, Shape, View
from jaxspec.models import Provider
from jaxspec.models.provider import Context
from jaxspec.trees import tree_of_parents


@jax.jit
def plain_token_rule(
    draws: js.Draws, proposal: Any, target_rows: Any, bonus: jax.Array | bool = False
) -> js.Verdict:
    """Algorithm 1 of Leviathan et al. 2023 as a textbook has it: all rows are read, all tests made."""
    tree = proposal.tree
    nodes = tree.max_nodes
    p = js.dense_rows(target_rows, nodes)
    q = js.dense_rows(proposal.draft_rows, nodes - 1)
    drafted, places = tree.tokens[1:], jnp.arange(nodes - 1, dtype=jnp.int32)
    ratio = p[places, drafted] > draws.accept[1:] * q[places, drafted]
    is_accepted = ratio & (tree.parents[1:] >= 0)
    accepted = jnp.sum(jnp.cumprod(is_accepted.astype(jnp.int32)), dtype=jnp.int32)
    is_leaf = accepted + 1 == tree.num_nodes
    rest = p[accepted] - jnp.where(is_leaf, 0.0, q[jnp.minimum(accepted, nodes - 2)])
    token = js.draw_token(draws.final, jnp.maximum(rest, 0.0))
    token = jnp.where(is_leaf & ~jnp.asarray(bonus) & (accepted > 0), -1, token)
    slots = jnp.arange(nodes, dtype=jnp.int32)
    kept = jnp.where(slots < accepted, jnp.roll(tree.tokens, -1), -1)
    return js.Verdict(
        tokens=kept.at[accepted].set(token),
        num_tokens=accepted + jnp.where(token >= 0, 1, 0).astype(jnp.int32),
        num_accepted=accepted,
        path=jnp.where(slots <= accepted, slots, -1),
        stop_node=accepted,
        status=jnp.int32(0),
    )


RULE = dataclasses.replace(js.RULES["token"], name="textbook", verify=plain_token_rule)


def test_the_audit_proves_a_custom_rule() -> None:
    rule = js.RULES["token"]
    for case in audit.instances_for(rule):
        law = audit.exact_law(rule, case, RULE.verify)
        assert law.is_proved, case.name


def texts_of(drafters: dict[str, Drafter], budget: int) -> list[tuple[int, ...]]:
    """The text of one key in the compiled loop, and in the host loop."""
    loop = CompiledDecoder(TARGET, drafters["network"], max_context=LENGTH, prefill_width=4)
    (text,) = loop.run(PROMPTS[:1], jax.random.key(3), new_tokens=budget)
    host = Decoder(provider(0.0, 1.0), drafters["callable"])
    return [text.tokens, host.run(PROMPTS[0], jax.random.key(3), new_tokens=budget).tokens]


def test_both_loops_decode_the_text_of_the_rule_that_a_custom_one_implements() -> None:
    texts = []
    for rule in (js.RULES["token"], RULE):
        models = {"network": DRAFT, "callable": provider(0.5, 1.0)}
        texts += texts_of({k: SampledPath(m, 3, rule) for k, m in models.items()}, 12)
    assert len(set(texts)) == 1


@dataclasses.dataclass(frozen=True)
class Repeat(Drafter):
    """Proposes that the last token is repeated, or followed by the next one."""

    depth: int
    vocab: int

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.depth + 2, 2, self.depth)

    def propose(self, view: View) -> Proposed:
        def one(token: jax.Array) -> js.PointMass:
            repeated = jnp.full(self.depth + 1, token).at[1].set((token + 1) % self.vocab)
            tokens = jnp.concatenate([token[None], repeated])
            parents = jnp.array([-1, 0, 0, 1, *range(3, self.depth + 1)], jnp.int32)
            sizes = {"max_children": 2, "max_depth": self.depth}
            return js.PointMass(
                tree=tree_of_parents(tokens, parents, jnp.int32(self.depth + 2), **sizes)
            )

        return Proposed(proposal=jax.vmap(one)(view.root_token))


def test_a_custom_drafter_decodes_one_text_in_both_loops() -> None:
    drafter = Repeat(3, VOCAB)
    assert drafter.describe() == {
        "drafter": "repeat", "depth": 3, "vocab": VOCAB, "rule": "point_mass",
    }  # fmt: skip
    assert drafter.draft([4, 1]).proposal.tree.tokens.tolist() == [1, 1, 2, 1, 1]
    assert drafter.draft([4, 1], depth=1).proposal.tree.tokens.tolist() == [1, 1, 2, -1, -1]
    texts = texts_of({"network": drafter, "callable": drafter}, 20)
    assert texts[0] == texts[1]


LAW = jax.random.dirichlet(jax.random.key(0), jnp.ones(VOCAB), (4,))
STORED: dict[str, Any] = {
    "rows of inner nodes": LAW[:3],
    "rows of all nodes": LAW,
    "rows in a slab": js.Probabilities(values=LAW[jnp.array([3, 0, 1, 2])], first=jnp.int32(1)),
    "logits": js.Logits(values=jnp.log(LAW) * 2, temperature=jnp.float32(2)),
}


@dataclasses.dataclass(frozen=True)
class Fixed(Drafter):
    """Draws a path from rows that never change."""

    stored: str
    kinds = (js.WithReplacement,)
    rule: js.Rule = js.RULES["token"]

    @property
    def capacity(self) -> Capacity:
        return Capacity(4, 1, 3)

    def propose(self, view: View) -> Proposed:
        def one(pairs: jax.Array) -> js.WithReplacement:
            return js.sampled_path(jax.vmap(js.draw_token)(pairs[1:], LAW[:3]), STORED[self.stored])

        return Proposed(proposal=jax.vmap(one)(view.pairs))


def test_the_draft_rows_of_a_custom_drafter_may_be_any_source_in_both_loops() -> None:
    drafters = [Fixed(stored) for stored in STORED]
    texts = [texts_of({"network": each, "callable": each}, 20) for each in drafters]
    assert len({*texts[0], *(text for pair in texts for text in pair)}) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"capacity": (2, 1, 1)}, "the capacity of Wrong is of type tuple: must be a Capacity"),
        ({"capacity": Capacity(0, 1, 0)}, "max_nodes of Wrong is 0"),
        ({"rule": "token"}, r'rule is .*RULES\["token"\]'),
        (
            {"block_sizes": (1, 4)},
            r"block_sizes of Wrong are \[1, 4\]: must .* end with max_nodes, 5",
        ),
        ({"first_depth": -1}, "first_depth of Wrong is -1"),
        ({"model": len}, "the model of Wrong is of type builtin_function_or_method: must be"),
    ],
)
def test_an_inconsistent_custom_drafter_is_an_error_in_both_loops(wrong: Any, message: str) -> None:
    kind = type("Wrong", (Repeat,), wrong)
    for make in (
        lambda: Decoder(provider(0.0, 1.0), kind(3, VOCAB)),
        lambda: CompiledDecoder(TARGET, kind(3, VOCAB)),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_a_token_outside_the_vocabulary_is_an_error_on_the_host() -> None:
    decoder = Decoder(Provider("two", 2, lambda _: [0.5, 0.5]), Repeat(3, 9))
    with pytest.raises(ValueError, match=r"Repeat proposed token 2 at node 2: outside .* of 2"):
        decoder.run([1], jax.random.key(0), new_tokens=9)


@pytest.mark.parametrize("wrong", [None, Proposed(proposal=None), js.chain(jnp.array([1, 2]))])
def test_what_is_no_proposal_is_an_error_in_both_loops(wrong: Any) -> None:
    drafter = type("Wrong", (Repeat,), {"propose": lambda self, view: wrong})(3, VOCAB)
    key = jax.random.key(0)
    for run in (
        lambda: Decoder(provider(0.0, 1.0), drafter).run([1], key),
        lambda: CompiledDecoder(TARGET, drafter).run([[1]], key),
    ):
        with pytest.raises(ValueError, match=r"what Wrong proposed.* must be a"):
            run()


# --- the exact law of sampled trees on any callable


def toy(seed: int, alive: int = 3) -> Provider:
    def row(context: Context) -> np.ndarray:
        weights = np.random.default_rng([seed, *context]).dirichlet(np.ones(alive))
        return np.concatenate([weights, np.zeros(3 - alive)])

    return Provider(f"toy {seed}", 3, row)


SHAPES = {"irregular": Shape.of_choices([(0,), (1,), (0, 0)]), "flat": (2,)}


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ("flat", "with_replacement"),
        ("irregular", "without_replacement"),
        ("irregular", "traversal"),
        ("irregular", "point_mass"),
    ],
)
def test_trees_on_callables_have_exactly_the_targets_law(shape: str, rule: str) -> None:
    drafter = FixedTree(toy(2), SHAPES[shape], js.RULES[rule])
    law = audit.decoding_law(Decoder(toy(1, 2), drafter), (0,), new_tokens=3)
    assert law.tv <= 1e-6
    assert (law.impossible, law.misses) == (0, 0)


def test_the_law_shows_an_irregular_tree_whose_candidates_are_dropped_by_their_value() -> None:
    class Picky(FixedTree):
        def finish(self, state: Any, view: View) -> Proposed:
            kept = state.is_in & ((state.tokens != 1) | (jnp.arange(4)[None] == 0))
            return super().finish(dataclasses.replace(state, is_in=kept), view)

    drafter = Picky(toy(2), SHAPES["irregular"], js.RULES["without_replacement"])
    assert audit.decoding_law(Decoder(toy(1), drafter), (0,), new_tokens=2).tv > 1e-3


@dataclasses.dataclass(frozen=True)
class Moody(Repeat):
    """Asks for whatever depth it is told to."""

    wish: Any = 0

    def next_depth(self, depth: jax.Array, accepted: jax.Array, proposed: jax.Array) -> jax.Array:
        return jnp.full_like(depth, self.wish, dtype=jnp.asarray(self.wish).dtype)


def both_loops(drafter: Drafter) -> list[Any]:
    loop = CompiledDecoder(TARGET, drafter, max_context=LENGTH, prefill_width=4)
    host = Decoder(provider(0.0, 1.0), drafter)
    return [
        lambda: loop.run(PROMPTS[:1], jax.random.key(3), new_tokens=8)[0].tokens,
        lambda: host.run(PROMPTS[0], jax.random.key(3), new_tokens=8).tokens,
    ]


def test_a_negative_next_depth_of_a_custom_drafter_is_none_in_both_loops() -> None:
    wanted, *others = [
        run() for wish in (0, -1) for run in both_loops(Moody(depth=2, vocab=VOCAB, wish=wish))
    ]
    assert others == [wanted] * 3


def test_a_next_depth_that_is_no_integer_is_an_error_in_both_loops() -> None:
    for run in both_loops(Moody(depth=2, vocab=VOCAB, wish=1.5)):
        with pytest.raises(
            ValueError, match=r"next_depth of Moody returned float32.*must be int32"
        ):
            run()
