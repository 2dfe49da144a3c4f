"""The verb `medfl concepts`: the text embeddings of a bundle's classes."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from medfl.cli.parser import add_verb, show
from medfl.cli.walls import Use, hold
from medfl.core.errors import InputError


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    concepts = add_verb(
        verbs, "concepts", "build and store the text embeddings of a bundle's classes", _concepts
    )
    concepts.add_bundle()
    concepts.add_text(
        "--plm",
        "NAME",
        "language model: biomedclip, clip, bert, roberta, minilm, or a folder that transformers can read",
        required=True,
    )
    concepts.add_text(
        "--model",
        "DIR",
        "folder of the language model; default: the Hugging Face cache, or a download",
    )
    concepts.add_trust()
    concepts.add_path("--out", "FILE", "output file; default: where --set plm=NAME looks for it")
    concepts.add_switch("--unmasked", "average over padding tokens too, as in the authors' code")
    concepts.add_number(
        "--dropout", "SEED", "keep the language model's dropout active, as in the authors' code"
    )


def _concepts(args: Namespace) -> int:
    hold(args, Use(bundles=[args.bundle], file="out"))
    from medfl.bundle import text_embeddings
    from medfl.bundle.bundle import Bundle

    bundle = Bundle(args.bundle)
    if (args.unmasked or args.dropout is not None) and args.out is None:
        raise InputError(
            "--unmasked or --dropout without --out",
            "such embeddings are used with --set plm=FILE, never by the model's name",
            "add --out FILE.safetensors",
        )

    path = args.out or text_embeddings.cached(args.plm, bundle.text)
    if path.suffix != ".safetensors":
        raise InputError(
            f"--out {path}", "embeddings are written as FILE.safetensors", "end it in .safetensors"
        )

    embeddings = text_embeddings.build(
        args.plm,
        bundle.text,
        args.model,
        download=True,
        masked=not args.unmasked,
        dropout=args.dropout,
    )
    embeddings.save(path)
    classes, prompts, size = embeddings.values.shape
    document = {
        "bundle": bundle.name,
        "plm": embeddings.plm,
        "weights_sha256": embeddings.weights_sha256,
        "pooling": embeddings.pooling,
        "classes": classes,
        "prompts": prompts,
        "dimension": size,
        "file": str(args.shown_file or path),
    }
    model = f"{embeddings.plm} ({embeddings.pooling})"
    text = f"{classes} classes x {prompts} prompts x {size} dimensions of {model}: {path}"

    return show(args, document, [text])
