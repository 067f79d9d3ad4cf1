"""The tables over all architectures, from the command line.

python -m posttrain.models.survey packing                               # every causal language model of transformers
python -m posttrain.models.survey packing qwen3_5 lfm2                  # these; exit status 1 if one is refused
python -m posttrain.models.survey samples                               # which can be sampled from
python -m posttrain.models.survey flops --path Qwen/Qwen3.5-4B --json   # one checkpoint: its config, no weights
"""

from __future__ import annotations

import argparse
import sys

from posttrain.errors import UserError
from posttrain.models.survey import flops, packing, samples
from posttrain.models.survey.tiny_models import builders

TABLES = {"packing": packing, "flops": flops, "samples": samples}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m posttrain.models.survey",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tables = parser.add_subparsers(dest="table", required=True, metavar="packing|flops|samples")
    for name, table in TABLES.items():
        first, _, more = (table.__doc__ or "").partition("\n")
        one = tables.add_parser(
            name, help=first, description=first + more, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        one.add_argument("architectures", nargs="*", help="model types of transformers; all of them by default")
        one.add_argument("--path", help="one checkpoint instead: a directory, or a name on the hub")
        one.add_argument("--json", action="store_true", help="the whole result, for programs")
        one.add_argument("--markdown", action="store_true", help="the table, for documents")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    try:
        models = builders(args.architectures, args.path, shapes=args.table == "packing")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return TABLES[args.table].main(args, models)


if __name__ == "__main__":
    sys.exit(main())
