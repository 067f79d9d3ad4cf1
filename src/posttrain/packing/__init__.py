"""Documents -> plan -> rows -> tensors, and back.

plan            the documents of each rank's micro-batches, equally many on every rank
build           the tensors of one micro-batch; boundaries are made here, on the host, and travel with the call
pack            both: the plan, and the tensors of this rank's micro-batches
unpack          from the tensors back to documents
statistics      what the plan costs
"""

from posttrain.packing.planning import document_cost, longest, plan, short_of_room, spare, statistics
from posttrain.packing.rows import build, not_finite, pack, unpack
from posttrain.records import Document, PackedRow

__all__ = [
    "Document",
    "PackedRow",
    "build",
    "document_cost",
    "longest",
    "not_finite",
    "pack",
    "plan",
    "short_of_room",
    "spare",
    "statistics",
    "unpack",
]
