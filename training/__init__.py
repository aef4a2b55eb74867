"""Train the pair of networks that is bundled with jaxspec; not part of the installed package."""
