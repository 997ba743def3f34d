/* common.h - the options that all compressed families share: transform, centre, fp16 rows, seed.
 *
 * transform.c, order.c and calibrated.c carry out the transform. src/cache carries out the centre
 * and the fp16 rows. codec.c uses the seed. */
#pragma once

#include <kvant/codec.h>

#include "options.h"

/* KVANT_OPTION_ABSENT: the family decides. */
typedef struct kvant_common {
    int32_t rotate, block, signs, order, transform, feedback, center, norm, sink, recent;
    uint64_t seed; /* the value of seed=, otherwise the seed of the call */
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

/* The first tokens of a sequence that stay fp16 when the centre is taken from the first rows,
 * unless the spec says otherwise. An attention sink's row lies far from that centre, so subtracting
 * the centre makes its error larger. Every such token costs a row of fp16. */
#define KVANT_CENTER_SINK 4u

/* Puts the values of center, norm, sink and recent into info, which holds the family's presets on
 * entry. `shown` gets those values that are not zero or differ from the preset. */
void kvant_common_apply(const kvant_common *common, kvant_codec_info *info, kvant_common *shown);
