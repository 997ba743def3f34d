/* llama_states.h - llama.cpp's functions that save and restore states, served packed.
 *
 * llama.cpp computes the size of a state from the type of the cache, so it counts the zeros behind
 * the records of state.c. Programs call llama_state_get_size and its family here. This file calls
 * llama.cpp's functions on reserved memory, and gives the program the packed state (pack.h) and its
 * size. A state without records goes to llama.cpp's functions unchanged. */
#pragma once

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
 * wanted, so that no bytes need be written. `kvp_saving_note` then notes that `room` bytes begin
 * with `kept` bytes of a record, and that zeros follow. Otherwise `kvp_saving_begin` says where the
 * kept bytes are written, which is `at` or a place without room for the zeros. `kvp_saving_end`:
 * they are written, or cannot be. */
bool kvp_saving_measures(void);
void kvp_saving_note(const void *at, size_t kept, size_t room);
uint8_t *kvp_saving_begin(uint8_t *at, size_t kept, size_t room);
void kvp_saving_end(bool done);

/* Called while a cache tensor is written. `kvp_restoring_wait` waits until these bytes of a packed
 * state are read and returns them; NULL when they are damaged. With `moves`, bytes that are exactly
 * a run may be returned elsewhere, without their zeros. `kvp_restoring_is_checked`: whether the
 * checksums of the records in these bytes were compared. */
const void *kvp_restoring_wait(const void *bytes, size_t n, bool moves);
bool kvp_restoring_is_checked(const void *bytes, size_t n);

/* The number of the state that is being restored, a new one for each; 0: the functions were not
 * taken over, or nothing is restored. alone: no other sequence of the context has tokens. */
unsigned kvp_restoring_number(bool *alone);

/* Called while a cache tensor is written whose cells are slots. `kvp_restoring_note` notes where
 * rows lie, and whether their blocks fit the cells. True: the state will be restored once more, to
 * other cells (align.h), so these rows are not stored. `kvp_restoring_ignores`: the same for a
 * tensor whose places are not needed. `kvp_restoring_fillers`: which cells of the run that
 * begins with these bytes belong to no row, and the number of all its cells; NULL: they all have
 * rows. */
struct kvp_align_place;
bool kvp_restoring_note(const void *tensor, const struct kvp_align_place *places, size_t n,
                        bool fits);
bool kvp_restoring_ignores(const void *tensor);
const bool *kvp_restoring_fillers(const void *bytes, size_t *n);

/* Notes that rows of the state that is being restored were refused. False when the functions were
 * not taken over: the rows' cells then have to be NaN. Otherwise the program is told that the state
 * was not restored. */
bool kvp_restoring_refuse(const char *why);

/* Notes that a cache was created whose rows may be saved as codes, or that it was freed. States of
 * a process without such caches are llama.cpp's business. */
void kvp_states_count(int n);
