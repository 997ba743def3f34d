/* twins.h - a context with kvant's cache and a context with llama.cpp's own f16 cache. Both get the
 * calls that a server makes: prompts, steps of several sequences, drafts, removed messages, slots
 * that are saved and restored.
 *
 * Each call checks that both contexts answer alike: the same status, the same positions, logits
 * that are numbers. It also counts the bytes of kvant's cache and the time of a step. The tests
 * decide how good answers must be, and set the bounds of bytes and times. */
#ifndef KVANT_TESTS_TWINS_H
#define KVANT_TESTS_TWINS_H

#include "harness.h"

enum { TWINS_SLOTS = 8, TWINS_STEPS = 4096, TWINS_TEXT = 4096, TWINS_BATCH = 512 };

typedef struct twins_slot {
    llama_token *held; /* its tokens; their positions are 0, 1, ... */
    int n;
    uint8_t *saved[2]; /* the states of both contexts, while the slot is in a file */
    size_t saved_size[2];
} twins_slot;

typedef struct twins {
    struct llama_context *both[2]; /* llama.cpp's own, kvant's */
    harness_options options;
    twins_slot slots[TWINS_SLOTS];
    int n_slots;
    llama_token text[TWINS_TEXT];
    int next; /* position in the text */
    /* the largest number of bytes that kvant's cache took after a call */
    double peak;
    double times[TWINS_STEPS]; /* times of single steps, as shares of llama.cpp's own time */
    /* parts of graphs that the mock of a GPU computed and did not replay */
    unsigned long parts;
    int n_steps;
} twins;

/* options: for kvant's context. exact: KVANT_EXACT. */
twins *twins_new(const harness_options *options, const char *exact);
void twins_free(twins *t);

/* The slot gets n more tokens of the text in batches. The last batch gives logits. */
void twins_prompt(twins *t, int slot, int n);

/* Decodes one token for each slot in the mask, in one batch. klds: receives the KLDs of their
 * logits, or is NULL. */
void twins_step(twins *t, unsigned slots, double *klds);

/* Decodes a batch of n_drafted tokens, of which the first n_accepted stay. */
void twins_draft(twins *t, int slot, int n_drafted, int n_accepted);

/* Removes tokens first .. end - 1 and moves later ones (llama-server's --cache-reuse). */
void twins_drop(twins *t, int slot, int first, int end);

/* twins_forget empties the slot. twins_save keeps its states, which twins_restore restores. */
void twins_forget(twins *t, int slot);
void twins_save(twins *t, int slot);
void twins_restore(twins *t, int slot);

/* Checks that both contexts have the same cells for the same tokens, as their states list them, and
 * that no row was lost. */
void twins_check_cells(twins *t);

/* The same tokens in new contexts that are compressed from the start: each slot's prompt in
 * batches, with nothing removed. The text continues where t's text does. */
twins *twins_plain(const twins *t);

/* The most bytes that kvant's cache may take: the size that kvant reports for a full cache. */
double twins_budget(const twins *t);

#endif /* KVANT_TESTS_TWINS_H */
