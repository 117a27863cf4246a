// Written by build.py.
&[]
