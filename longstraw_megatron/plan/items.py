"""The items that a rank's memory is split into, by the planner's formula and by the dry run alike."""

from enum import StrEnum


class Item(StrEnum):
    """What bytes are for. The order is that of the tables."""

    WEIGHTS = "weights"  # parameters and buffers of the model
    GRADIENTS = "gradients"  # DDP's main_grad of the trainable parameters
    OPTIMIZER = "optimizer"  # main weights and both moments of this rank's shard
    STATE = "state"  # rows of the prefix: K and V, latents, index keys, and the recorded experts
    STATE_GRADIENTS = "state gradients"  # accumulators of the rows
    BOUNDARIES = "boundaries"  # recurrent state and convolution tail at segment boundaries
    BOUNDARY_GRADIENTS = "boundary gradients"
    STAGE_INPUTS = "stage inputs"  # kept from prefill to the walk, and those that wait to be used or sent
    GRAPH = "graph"  # what autograd keeps of the live microbatches, and the temporaries of the op that runs
    LOGITS = "logits"  # one block of response tokens by this rank's vocabulary, and the head's weight gradient
    COMMUNICATION = "communication"  # buffers of collectives that live beside the graph
    FRAGMENTATION = "fragmentation"  # allowance: context, NCCL, cuBLAS, and what the allocator can't reuse


# What a recorder of tensors cannot tell apart without knowing the operation: it counts them as one.
ACTIVATIONS = (Item.GRAPH, Item.LOGITS, Item.COMMUNICATION)
