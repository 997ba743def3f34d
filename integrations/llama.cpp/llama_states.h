/* llama_states.h - llama.cpp's functions that save and restore states, served packed.
 *
 * llama.cpp computes the size of a state from the type of the cache, so it counts the zeros behind
 * the records of state.c. Programs call llama_state_get_size and its family here. This file calls
 * llama.cpp's functions on reserved memory, and gives the program the packed state (pack.h) and its
 * size. A state without records goes to llama.cpp's functions unchanged. */
#ifndef KVP_LLAMA_STATES_H
#define KVP_LLAMA_STATES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Takes the functions over, in all modules that are loaded and import them. Called once, when the
 * plug-in is loaded. NULL, or the reason why states keep their nominal size; then nothing has
 * changed. */
const char *kvp_states_serve(void);

/* Whether the functions were taken over. */
bool kvp_states_are_served(void);

/* Called while a cache tensor is read. `kvp_saving_measures`: whether only the size of the state is
 * wanted, so that no bytes need be written. `kvp_saving_note` notes that `room` bytes begin with
 * `kept` bytes of a record, and that zeros follow. */
bool kvp_saving_measures(void);
void kvp_saving_note(const void *at, size_t kept, size_t room);

/* Notes that rows of the state that is being restored were refused. False when the functions were
 * not taken over: the rows' cells then have to be NaN. Otherwise the program is told that the state
 * was not restored. */
bool kvp_restoring_refuse(const char *why);

/* Notes that a cache was created whose rows may be saved as codes, or that it was freed. States of
 * a process without such caches are llama.cpp's business. */
void kvp_states_count(int n);

#endif /* KVP_LLAMA_STATES_H */
