/* versions.h - chooses the centre and the scale of each row. docs/internals/architecture.md,
 * "Versions", has the rules. */
#ifndef KVANT_CACHE_VERSIONS_H
#define KVANT_CACHE_VERSIONS_H

#include "tensor.h"

/* What a batch of rows says about the versions. */
typedef struct kvant_choice {
    bool judged;     /* else blocks keep their version, and new blocks go by their sequence */
    uint8_t version; /* for the rows, if judged: KVANT_CANDIDATE for a new one until it is published */
    bool unfit[KVANT_MAX_VERSIONS]; /* rows stored with this version would err much more */
} kvant_choice;

/* Judges the rows that were seen, of which there is at least one. Changes the candidate alone. */
kvant_choice kvant_versions_judge(kvant_tensor *tensor, const kvant_statistics *seen);

/* Puts the choice into force; rows that waited for the first version are expressed in it. */
void kvant_choice_publish(kvant_tensor *tensor, kvant_choice *choice);

#endif
