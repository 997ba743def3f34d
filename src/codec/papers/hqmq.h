/* hqmq.h - the secondary quaternions of an hqmq codec, for the library that runs it on GPUs. */
#ifndef KVANT_CODEC_HQMQ_H
#define KVANT_CODEC_HQMQ_H

#include "../../math/quaternion.h"
#include "../codec_internal.h"

/* Sets *n to their number; they live as long as the codec. Directions are rounded from products with
 * these, so whoever makes directions of them needs them unrounded. */
const kvant_quaternion *kvant_hqmq_secondaries(const kvant_codec *codec, uint32_t *n);

#endif
