/* common.h - the options that all compressed families share: transform, centre, fp16 rows, seed.
 *
 * transform.c, order.c and site.c carry out the transform. src/cache carries out the centre and the
 * fp16 rows. codec.c uses the seed. */
#pragma once

#include <kvant/codec.h>

#include "options.h"

/* KVANT_OPTION_ABSENT: the family decides. */
typedef struct kvant_common {
    int32_t rotate, block, signs, order, transform, feedback, center, norm, sink, recent;
    uint64_t seed; /* the option's, else that of the call */
} kvant_common;

/* Without any option. */
#define KVANT_COMMON_NONE(call_seed) { -1, -1, -1, -1, -1, 0, -1, -1, -1, -1, call_seed }

enum {
    KVANT_WEIGHTING_NONE,
    KVANT_WEIGHTING_DIAGONAL,
    KVANT_WEIGHTING_FILE,
    KVANT_WEIGHTING_FIRST
};

/* order=, of keys (order.h). */
typedef enum kvant_order {
    KVANT_ORDER_STORED,
    KVANT_ORDER_HALVES,
    KVANT_ORDER_PAIRS,
    KVANT_ORDER_DEALT
} kvant_order;

/* Every option, for families whose chunks or groups depend on the order of channels. Other families
 * take fewer. */
extern const kvant_option kvant_common_options_ordered[];
extern const kvant_option kvant_common_options[]; /* no order */
extern const kvant_option
    kvant_common_options_uncentred[]; /* no center, norm, transform, feedback */

/* A centre taken from the first rows leaves an attention sink's row, which lies far from the
 * centre, worse off than before: this many first tokens stay fp16 then, unless the spec says
 * otherwise. */
#define KVANT_CENTER_SINK 4u

/* Puts center, norm, sink and recent into info, which holds the family's presets; in shown, those
 * that are not zero or differ from the preset. */
void kvant_common_apply(const kvant_common *common, kvant_codec_info *info, kvant_common *shown);
