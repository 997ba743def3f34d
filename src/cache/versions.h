/* versions.h - chooses the centre and the scale of each row. learning.md has the rules. */
#pragma once

#include "tensor.h"

/* What a batch of rows says about the versions. */
typedef struct kvant_choice {
    bool judged; /* else blocks keep their version, and new blocks go by their sequence */
    uint8_t
        version; /* for the rows, if judged: KVANT_CANDIDATE for a new one until it is published */
    bool unfit[KVANT_MAX_VERSIONS]; /* rows stored with this version would err much more */
    kvant_status status;            /* KVANT_ERR_MEMORY: there is no choice */
} kvant_choice;

/* Rows from which a version is made: enough for a mean that removes nearly all of the constant part
 * of keys. A batch of as many is judged by itself: what came before may be of another kind. */
#define KVANT_LEARN_ROWS 64u

/* n >= 1 finite rows of a write, row i at rows + i * stride for slots[i]. */
typedef struct kvant_new_rows {
    const float *rows;
    size_t stride, n;
    const int64_t *slots;
} kvant_new_rows;

/* Judge rows; or all rows noted since they were last forgotten. Both change the candidate and what
 * transform=first has learnt, which a write that fails must forget (kvant_learning_reset). */
kvant_choice kvant_versions_judge(kvant_tensor *tensor, const kvant_new_rows *rows,
                                  uint32_t n_threads);
kvant_choice kvant_versions_judge_noted(kvant_tensor *tensor, uint32_t n_threads);

/* There is room for statistics of rows, until they are forgotten. KVANT_ERR_MEMORY. */
kvant_status kvant_versions_open(kvant_tensor *tensor);

/* Versions that a tensor can have, the initial one counted. */
uint32_t kvant_versions_at_most(const kvant_tensor *tensor);

/* Bytes that learning takes now, beside the versions; and the most that it keeps between two
 * calls. */
size_t kvant_versions_bytes(const kvant_tensor *tensor);
size_t kvant_versions_most(const kvant_tensor *tensor);

/* Notes rows that came a few at a time, and forgets them. judged: a judgement of them follows, which may fail. */
void kvant_versions_note(kvant_tensor *tensor, const kvant_new_rows *rows, bool judged);
void kvant_versions_forget(kvant_tensor *tensor);

/* After a judgement that failed for lack of memory: as if the rows noted last had not been. */
void kvant_versions_unnote(kvant_tensor *tensor);

/* Whether the rows judged last fit a version, KVANT_CANDIDATE among them, as far as their largest numbers
 * tell: rows that need no closer look. */
bool kvant_versions_fit(const kvant_tensor *tensor, uint32_t version);

/* Puts the choice into force; rows that waited for the first version are expressed in it. */
void kvant_choice_publish(kvant_tensor *tensor, kvant_choice *choice);
