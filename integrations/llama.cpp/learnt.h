/* learnt.h - calibrations that earlier runs left in the user's cache folder, one per model file:
 *
 *   $XDG_CACHE_HOME/kvant/learnt/FINGERPRINT.kvcal     or below ~/.cache
 *
 * A process that has one model's file mapped into memory runs that model. kvant exec tells the path
 * (KVANT_MODEL) for programs that read the file instead. */
#ifndef KVP_LEARNT_H
#define KVP_LEARNT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <kvant/calibration.h>

#define KVP_LEARNT_PATH 1024u

typedef struct kvp_learnt {
    uint64_t fingerprint; /* of the model's file; 0: not known, nothing is learnt */
    char model[KVP_LEARNT_PATH];
    char path[KVP_LEARNT_PATH]; /* what is learnt goes here; "": nowhere */
    char used[KVP_LEARNT_PATH]; /* the calibration that is there: beside the model, else path; "": none */
} kvp_learnt;

/* Finds out what there is. Says when a file cannot be used. */
void kvp_learnt_find(kvp_learnt *learnt);

/* Writes what was learnt, at once or not at all. A calibration that another process has left
 * meanwhile stays: false with "" in err. False with one line in err when it cannot be written. */
bool kvp_learnt_keep(const kvp_learnt *learnt, const kvant_calibration *calibration, char *err, size_t errlen);

#endif /* KVP_LEARNT_H */
