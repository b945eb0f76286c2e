"""A folder for the module path: holds a package named `sgl_kernel` for machines where no real one exists.

The launcher puts it on the module path only when there is no GPU and no installed `sgl_kernel`.
"""
