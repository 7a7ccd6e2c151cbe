"""The core calls that torch's compiler knows: what each call of a step becomes, and a graph of them."""
