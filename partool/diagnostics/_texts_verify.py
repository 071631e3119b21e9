"""Rules about the steps of ranks, checked in the traces of their dry runs (PT592 to PT599, PT695 to PT698)."""

from __future__ import annotations

from partool.diagnostics.record import Rule, command_rule

RULES: tuple[Rule, ...] = (
    command_rule(
        "PT592",
        "A rank skips a collective that others issue",
        "A collective completes once every rank of its group has issued it: the others wait until they time out.",
        "if rank == 0: dist.all_reduce(norm)",
        "dist.all_reduce(norm)   # on every rank of the group",
    ),
    command_rule(
        "PT593",
        "Ranks issue different collectives at the same place",
        "The n-th collectives of a group meet, whatever they are: kinds, types or sizes that differ hang or mix data.",
        "dist.all_reduce(grad[:rows])   # rows differs between ranks",
        "dist.all_reduce(grad)   # equal sizes on all ranks",
    ),
    command_rule(
        "PT594",
        "A message has no other end",
        "A send without a receive, or a receive without a send, never completes.",
        "dist.isend(x, 1)   # rank 1 receives one message fewer",
        "dist.isend(x, 1)   # and rank 1: dist.irecv(x, 0)",
    ),
    command_rule(
        "PT595",
        "A message is received as something else",
        "Messages between two ranks arrive in the order of sending; sizes and types are not sent with them.",
        "dist.isend(x.bfloat16(), 1)   # rank 1: dist.irecv(torch.empty_like(x), 0)",
        "dist.isend(x, 1)   # rank 1: dist.irecv(torch.empty_like(x), 0)",
    ),
    command_rule(
        "PT596",
        "A rank uses a group that does not contain it",
        "Both ends of a message, and each rank that issues a collective, must be in the group.",
        "dist.isend(x, 5, group=group_of_ranks_0_to_3)",
        "dist.isend(x, 3, group=group_of_ranks_0_to_3)",
    ),
    command_rule(
        "PT597",
        "Ranks may wait for each other in a circle",
        "A rank may wait for its device between two exchanges (the allocator frees memory, a kernel is loaded on first "
        "use). Exchanges in different orders on two ranks then hang, though not in every run.",
        "rank 0: send to 1, compute, receive from 1   # rank 1: send to 0, compute, receive from 0",
        "rank 0: send to 1, compute, receive from 1   # rank 1: receive from 0, compute, send to 0",
    ),
    command_rule(
        "PT598",
        "A rank fails in its dry run",
        "A dry run executes the code that trains, for the planned device and with tensors that have no memory. An "
        "error in it is one that all ranks of a real run would meet, after they have waited for machines.",
        "partool plan spec.yaml --verify   # a traceback of the model's own code",
        "partool plan spec.yaml --verify   # after the code is mended",
    ),
    command_rule(
        "PT599",
        "A plan does not fit by its dry run",
        "The dry run counts the tensors of each rank that differs, and models what the allocator reserves for them. "
        "With the parts outside of tensors the fullest rank needs more than the device has.",
        "partool plan spec.yaml --verify   # predicted 70 GiB, executed 82 GiB of 80",
        "partool plan spec.yaml --verify --set parallel.micro_batch=1",
    ),
    command_rule(
        "PT695",
        "The ranks' checkpoints do not hold the training state",
        "Each rank saves its parts of parameters and moments. Together the parts must cover each tensor once, and each "
        "rank must read the blocks that it saves: a gap shows only when a run is resumed.",
        "rank 0 saves rows 0 to 7, rank 1 rows 9 to 15   # of 16 rows",
        "rank 0 saves rows 0 to 7, rank 1 rows 8 to 15   # of 16 rows",
    ),
    command_rule(
        "PT696",
        "A rank holds more memory after each step",
        "State is made in the first step, and what a later step makes beside it is freed by its end. A tensor that "
        "code keeps, such as a loss in a list, adds its bytes in each step until the device is full.",
        "self.losses.append(loss)   # keeps the graph of each step",
        "self.losses.append(loss.detach())   # or a sum that each step overwrites",
    ),
    command_rule(
        "PT697",
        "A rank holds more than was planned",
        "Tensors of a kind hold over 15 % and over 16 MiB more at the executed peak than planned. Code may free "
        "them too late: gathered parameters after their use, activations that recomputation should drop. The plan's "
        "memory is corrected; the finding is a warning.",
        "self.kept = hidden   # until the next step",
        "del hidden",
    ),
    command_rule(
        "PT698",
        "A rank's dry run takes too long",
        "A dry run computes nothing and takes seconds to minutes. A rank that exceeds the limit is ended, and the "
        "dry run with it.",
        "while True: pass   # in the model's code",
        "partool plan spec.yaml --verify --rank-limit 7200   # if the model is that large",
    ),
)
