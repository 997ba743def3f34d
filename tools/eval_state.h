/* eval_state.h - the file of --resume: the values of every complete (configuration, chunk). eval
 * keeps one value per scored token, needle one per question.
 *
 * A header names model, cut and runtime. Records of one size follow, one per (configuration,
 * chunk), each with its own checksum. A record is appended as soon as it is complete. So the cost
 * of an interruption does not grow with the work done, and an incomplete record is cut off. One
 * file serves command lines with different configurations, texts and numbers of chunks.
 */
#pragma once

#include "base_cache.h"

typedef struct eval_state {
    const char *path; /* NULL: nothing is kept */
    int file;
    size_t n_rows, record_bytes;
    unsigned char *records; /* those that were there */
    size_t n_records;
    uint64_t end; /* where the next one goes */
} eval_state;

/* Opens or makes the file; key.tokens does not matter. path NULL: an empty state that keeps
 * nothing. False after complaining: it is another evaluation's, in use, or cannot be written. */
bool eval_state_open(eval_state *s, const char *path, const base_key *key);
void eval_state_close(eval_state *s);

/* Reads the n_rows values that the file has for this configuration and chunk. config and tokens are
 * their fingerprints. False when it has none. */
bool eval_state_find(const eval_state *s, uint64_t config, uint64_t tokens, double *kv_bytes,
                     score_value *values);

/* Adds a record, which is on the disk when the function returns. False after complaining; earlier
 * records stay valid. */
bool eval_state_add(eval_state *s, uint64_t config, uint64_t tokens, double kv_bytes,
                    const score_value *values);
