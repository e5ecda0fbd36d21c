"""Ray actors: shells that hold state, call the core below, and translate errors.

Reading order: specs, expert_group, attention_stack, controller, local_ray, supernode.
"""
