"""Samplers in NumPy with the arguments of serving engines: right ones, and plausible wrong ones."""

from typing import Any

import numpy as np


def pick(row: np.ndarray, u: float) -> int:
    running = np.cumsum(row, dtype=np.float64)
    return int(np.searchsorted(running[:-1], u * running[-1], side="right"))


def flat_sampler(fault: str = "", *, is_flat_output: bool = False) -> Any:
    """As vLLM's rejection_sample; of each sequence's uniforms the last draws the recovered token."""

    def sample(
        *,
        draft_token_ids: np.ndarray,
        num_draft_tokens: np.ndarray,
        cu_num_draft_tokens: np.ndarray,
        max_spec_len: int,
        draft_probs: np.ndarray | None,
        target_probs: np.ndarray,
        randomness: np.ndarray,
        bonus_token_ids: np.ndarray | None = None,
    ) -> np.ndarray:
        output = np.full((len(num_draft_tokens), max_spec_len + 1), -1)
        vocab = target_probs.shape[1]
        has_bonus_rows = len(target_probs) == len(draft_token_ids) + len(num_draft_tokens)
        for b, own in enumerate(num_draft_tokens):
            count, begin = own, cu_num_draft_tokens[b] - own
            if fault == "cu_num":
                begin = min(cu_num_draft_tokens[b], len(draft_token_ids) - count)
            uniforms = randomness[b]
            if not isinstance(uniforms, np.ndarray):
                uniforms = uniforms.random(max_spec_len + 1)
            row = begin + (b if has_bonus_rows and fault != "bonus rows" else 0)
            is_rejected = False
            if fault == "padding":  # what comes after a sequence's own tokens counts as its
                count = min(max_spec_len, len(draft_token_ids) - begin)
            for t in range(count):
                x, p = draft_token_ids[begin + t], target_probs[row + t]
                q = np.where(np.arange(vocab) == x, 1.0, 0.0)
                if draft_probs is not None:
                    q = draft_probs[begin + t]
                elif fault == "none":
                    q = np.full(vocab, 1 / vocab)
                if float(uniforms[t]) * q[x] < p[x]:
                    output[b, t] = x
                    continue
                output[b, t] = pick(np.maximum(p - q, 0), float(uniforms[-1]))
                is_rejected = True
                break
            if has_bonus_rows and not is_rejected:
                output[b, count] = pick(target_probs[row + count], float(uniforms[-1]))
            elif bonus_token_ids is not None and (not is_rejected or fault == "bonus"):
                other = fault == "bonus of another"
                output[b, count] = bonus_token_ids[max(b - 1, 0) if other else b, 0]
        if not is_flat_output:
            return output
        own = [output[b, :count] for b, count in enumerate(num_draft_tokens)]
        last = [output[b, count] for b, count in enumerate(num_draft_tokens)]
        return np.concatenate([*own, last])

    return sample


def assisted_sampler(fault: str = "") -> Any:
    """As transformers' _speculative_sampling, with uniforms: T for tests, one for the last token."""

    def softmax(logits: np.ndarray) -> np.ndarray:
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True)

    def sample(
        candidate_input_ids: np.ndarray,
        candidate_logits: np.ndarray,
        candidate_length: int,
        new_logits: np.ndarray,
        randomness: np.ndarray,
    ) -> tuple[np.ndarray, int]:
        new = candidate_input_ids[0, :candidate_length]
        if fault != "prompt":
            new = candidate_input_ids[0, candidate_input_ids.shape[1] - candidate_length :]
        q, p = softmax(candidate_logits[0]), softmax(new_logits[0])
        matches = 0
        while matches < candidate_length:
            x = new[matches]
            if not randomness[matches] * q[matches, x] < p[matches, x]:
                break
            matches += 1
        left = p[matches]
        if matches < candidate_length and fault != "residual":
            left = np.maximum(p[matches] - q[matches], 0)
        return np.array([[*new[:matches], pick(left, randomness[-1])]]), matches

    return sample


def linked_sampler(fault: str = "") -> Any:
    """As sglang's target-only kernel; with draft_probs, siblings drawn without replacement."""

    def sample(
        *,
        candidates: np.ndarray,
        retrive_index: np.ndarray,
        retrive_next_token: np.ndarray,
        retrive_next_sibling: np.ndarray,
        uniform_samples: np.ndarray,
        uniform_samples_for_final_sampling: np.ndarray,
        draft_probs: np.ndarray | None,
        target_probs: np.ndarray,
        num_speculative_tokens: int,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        num, _ = candidates.shape
        predicts = np.full(candidates.size, -1)
        accept_index = np.full((num, num_speculative_tokens), -1)
        accept_token_num = np.zeros(num, int)
        for b in range(num):
            node, coins = 0, uniform_samples[b]
            coin = coins[0]
            accept_index[b, 0] = last = retrive_index[b, 0]
            while True:
                children, below = [], retrive_next_token[b, node]
                while below != -1:
                    children.append(below)
                    below = retrive_next_sibling[b, below]
                if fault == "siblings":
                    children.reverse()
                r = target_probs[b, node].astype(np.float64)
                s = None if draft_probs is None else draft_probs[b, node].astype(np.float64)
                tossed, accepted = 0.0, -1
                for child in children:
                    x = candidates[b, child]
                    if s is None:
                        tossed += target_probs[b, node, x]
                        is_accepted = coin < tossed
                        r[x] = 0
                    else:
                        is_accepted = coins[child] * s[x] < r[x]
                        left = np.maximum(r - s, 0)
                        r = left / left.sum() if left.sum() > 0 else r
                        s[x] = 0
                        s = s / s.sum() if s.sum() > 0 else s
                    if is_accepted:
                        accepted = child
                        break
                if accepted < 0:
                    break
                coin = coins[node if fault == "coin" else accepted]
                node, predicts[last] = accepted, candidates[b, accepted]
                last = retrive_index[b, node]
                if fault == "index":
                    last -= retrive_index[b, 0]
                accept_token_num[b] += 1
                accept_index[b, accept_token_num[b]] = last
            final = coins[0] if fault == "final" else uniform_samples_for_final_sampling[b]
            predicts[last] = pick(r, final)
        return predicts, accept_index, accept_token_num

    return sample
