"""Tree verification: several candidates a slot, one target forward over all of them.

The slots of a DFlash block are independent given the context, so a candidate path is as probable as
the product of its slots. A tree holds the most probable paths; the target reads all its nodes at
once, each of which sees the committed tokens and its own ancestors. What is accepted is one path,
and it is brought into the shape of a verified block, so that context, relay and commit are those of
a chain.

Shapes: R requests, N nodes (node 0 is the anchor), M = N-1 drafted nodes, K slots of a block, J =
K-1 drafts, T token slots, C tapped width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflow_lightning.decode.state import Models
from dflow_lightning.errors import InputError, is_whole
from dflow_lightning.models.drafter import Drafter
from dflow_lightning.models.slot_cache import SlotCache

MOST_NODES = 256


@dataclass(frozen=True)
class Tree:
    """Candidate tokens, parents before children, the more probable before the less.

    Args:
        tokens_RN: node 0 is the anchor's token.
        depth_RN: slot of each node; 0 for the anchor.
        parent_RN: index of the node before; 0 for the anchor.
        ancestor_RNN: whether the second node is the first one or lies on its way to the anchor.
    """

    tokens_RN: Tensor
    depth_RN: Tensor
    parent_RN: Tensor
    ancestor_RNN: Tensor


@dataclass(frozen=True)
class Path:
    """The accepted path and the most probable one below its end, a node a depth.

    Args:
        nodes_RK: the node of each depth, arbitrary where there is none.
        length_R: depths that have a node.
        num_accepted_R: depth of the last accepted node.
    """

    nodes_RK: Tensor
    length_R: Tensor
    num_accepted_R: Tensor


def candidate_pairs(num_nodes: int, device: torch.device | str = "cpu") -> Tensor:
    """Which child of which node of the depth before may be among the best, `[2, P]`.

    Child c of the b-th best node of a depth has (b+1)(c+1) - 1 nodes of its own depth before it. An
    engine makes them once: they are data of the host, which a round must not copy.
    """
    wanted = num_nodes - 1
    pairs = [(b, c) for b in range(wanted) for c in range(wanted // (b + 1))]
    return torch.tensor(pairs, device=device).T


def grow(
    logits_RJV: Tensor, anchor_ids_R: Tensor, num_nodes: int, pairs_2P: Tensor | None = None
) -> Tree:
    """The `num_nodes` most probable nodes of all paths, the anchor among them.

    A node is never more probable than its parent, and no less than its later siblings; so the most
    probable nodes are a tree, and few pairs of node and child have to be looked at.

    Args:
        pairs_2P: from `candidate_pairs`.
    """
    wanted, device = num_nodes - 1, logits_RJV.device
    log_RJV = logits_RJV.float().log_softmax(-1).clamp(max=0)
    best_RJW, ids_RJW = log_RJV.topk(wanted, dim=-1)
    # NaN has no order, and a tree that is none would be read out of bounds.
    best_RJW = best_RJW.masked_fill(best_RJW.isnan(), 0)
    above_P, child_P = candidate_pairs(num_nodes, device) if pairs_2P is None else pairs_2P
    index_N = torch.arange(num_nodes, device=device)
    index_RM = index_N[1:].expand(log_RJV.shape[0], -1)
    # Depth 1, then each depth's best from the pairs; the places are those among all candidates.
    scores = [torch.zeros_like(best_RJW[:, 0, :1]), best_RJW[:, 0]]
    tokens = [anchor_ids_R.unsqueeze(1), ids_RJW[:, 0]]
    parents = [torch.zeros_like(index_RM[:, :1]), torch.zeros_like(index_RM)]
    for depth in range(2, logits_RJV.shape[1] + 1):
        score_RP = scores[-1][:, above_P] + best_RJW[:, depth - 1, child_P]
        order_RM = _best_first(score_RP)[:, :wanted]
        scores.append(score_RP.gather(1, order_RM))
        tokens.append(ids_RJW[:, depth - 1].gather(1, child_P[order_RM]))
        parents.append((depth - 2) * wanted + 1 + above_P[order_RM])
    kept_RN = _best_first(torch.cat(scores, 1))[:, :num_nodes]
    all_tokens, all_parents = torch.cat(tokens, 1), torch.cat(parents, 1)
    place_RA = torch.zeros_like(all_parents).scatter_(1, kept_RN, index_N.expand_as(kept_RN))
    parent_RN = place_RA.gather(1, all_parents.gather(1, kept_RN))
    return Tree(
        tokens_RN=all_tokens.gather(1, kept_RN),
        depth_RN=(kept_RN + wanted - 1) // wanted,
        parent_RN=parent_RN,
        ancestor_RNN=ancestors(parent_RN, logits_RJV.shape[1]),
    )


def _best_first(score_RA: Tensor) -> Tensor:
    """Indices in the order of the scores; of equal ones the first, so never a child before its
    parent."""
    return score_RA.argsort(dim=-1, descending=True, stable=True)


def ancestors(parent_RN: Tensor, depth: int) -> Tensor:
    """`[R, N, N]`: whether the second node is the first one or lies on its way to the anchor."""
    nodes = parent_RN.shape[1]
    own_NN = torch.eye(nodes, dtype=torch.bool, device=parent_RN.device)
    found_RNN = own_NN.expand(parent_RN.shape[0], -1, -1)
    above_RN = parent_RN
    for _ in range(depth):
        found_RNN = found_RNN | own_NN[above_RN]
        above_RN = parent_RN.gather(1, above_RN)
    return found_RNN


def tree_visible(tree: Tree, anchor_R: Tensor, length: int) -> Tensor:
    """`[R, N, T]`: a node sees what stands before the anchor, and its ancestors' cache slots."""
    num_nodes = tree.tokens_RN.shape[1]
    offset_RT = torch.arange(length, device=anchor_R.device) - anchor_R.unsqueeze(1)
    inside_RT = (offset_RT >= 0) & (offset_RT < num_nodes)
    index_RNT = offset_RT.clamp(0, num_nodes - 1).unsqueeze(1).expand(-1, num_nodes, -1)
    of_tree_RNT = tree.ancestor_RNN.gather(2, index_RNT) & inside_RT.unsqueeze(1)
    return of_tree_RNT | (offset_RT < 0).unsqueeze(1)


def follow(tree: Tree, chosen_RN: Tensor, block_size: int) -> Path:
    """The path that equals the target's own choices, and the most probable one below its end.

    Args:
        chosen_RN: the target's token after each node.
    """
    depth_RN, num_nodes = tree.depth_RN, tree.depth_RN.shape[1]
    hit_RN = (tree.tokens_RN == chosen_RN.gather(1, tree.parent_RN)) | (depth_RN == 0)
    # Siblings differ, so that at most one node of a depth is accepted.
    accepted_RN = (hit_RN.unsqueeze(1) | ~tree.ancestor_RNN).all(-1)
    num_accepted_R = accepted_RN.sum(1) - 1
    last_R = (accepted_RN * depth_RN).argmax(1)
    below_RN = tree.ancestor_RNN.gather(2, last_R[:, None, None].expand(-1, num_nodes, 1))[..., 0]
    depths_K1 = torch.arange(block_size, device=chosen_RN.device).unsqueeze(1)
    of_path_RKN = (depth_RN.unsqueeze(1) == depths_K1) & (accepted_RN | below_RN).unsqueeze(1)
    # The first node of a depth is its most probable one, and the parent of the next depth's.
    index_N = torch.arange(num_nodes, device=chosen_RN.device)
    nodes_RK = torch.where(of_path_RKN, index_N, num_nodes - 1).amin(-1)
    return Path(nodes_RK, of_path_RKN.any(-1).sum(1), num_accepted_R)


def compact(cache: SlotCache, anchor_R: Tensor, nodes_RK: Tensor) -> None:
    """Move the keys and values of the path's nodes to the cache slots of their positions.

    What is moved beyond the accepted path is never seen: the next block's anchor lies before it.
    """
    rows_R1 = torch.arange(anchor_R.shape[0], device=anchor_R.device).unsqueeze(1)
    source_RK = anchor_R.unsqueeze(1) + nodes_RK
    slots_RK = anchor_R.unsqueeze(1) + torch.arange(nodes_RK.shape[1], device=anchor_R.device)
    for buffer in cache.buffers():
        buffer[rows_R1, :, slots_RK] = buffer[rows_R1, :, source_RK]


def check_tree_settings(
    tree_nodes: int | None, acceptance: str, backend: Any, *, speculative: bool = True
) -> None:
    """Refuse what a tree cannot be verified with; needs no model.

    Raises:
        InputError: plain decoding, a number out of range, rejection sampling, or a backend that is
            not eager.
    """
    if tree_nodes is None:
        return
    if not speculative:
        raise InputError(
            f"tree_nodes is {tree_nodes}, but plain decoding drafts nothing; leave one of both out"
        )
    if not is_whole(tree_nodes) or not 2 <= tree_nodes <= MOST_NODES:
        raise InputError(f"tree_nodes is {tree_nodes!r}; give 2 to {MOST_NODES}")
    if acceptance != "match":
        raise InputError(
            f"tree_nodes is {tree_nodes}, but acceptance is {acceptance}; a tree is verified by "
            "match, so give that or leave tree_nodes out"
        )
    if backend != "eager":
        name = backend if isinstance(backend, str) else "made elsewhere"
        raise InputError(
            f"tree_nodes is {tree_nodes}, but backend is {name}; a tree is verified eagerly, so "
            "give eager or leave tree_nodes out"
        )


def slots_are_independent(drafter: object) -> bool:
    """Whether a drafter's paths are products of its slots, which a tree is grown from."""
    return isinstance(drafter, Drafter) and drafter.causal_head is None


def check_tree(tree_nodes: int, models: Models, acceptance: str, backend: Any) -> None:
    """Also refuse models that a tree cannot be drafted with.

    Raises:
        InputError: what `check_tree_settings` refuses, a drafter whose slots depend on each other,
            or more nodes than the vocabulary has tokens.
    """
    check_tree_settings(tree_nodes, acceptance, backend)
    if not slots_are_independent(models.drafter):
        raise InputError(
            f"tree_nodes is {tree_nodes}, but a tree needs a DFlash or DFlow drafter without a "
            "causal head, whose slots are independent; leave tree_nodes out"
        )
    if tree_nodes > models.target.vocab_size:
        raise InputError(
            f"tree_nodes is {tree_nodes}; the vocabulary of {models.target.vocab_size} tokens "
            "allows no more than that"
        )
