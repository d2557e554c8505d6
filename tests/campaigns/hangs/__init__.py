"""The campaign of hangs: one thing is made to hang somewhere in a step over workers, and the error must name it.

``planted``   the entry of its workers: those of the package, in which a ``Plant`` makes something hang
``cases``     what a case is, drawn from its seed
``campaign``  runs cases on pools that they share, and judges what is said of each
"""
