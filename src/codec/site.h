/* site.h - the numbers that a calibration gives to the codec of one (layer, kv head, role). Codecs
 * read calibrations through this file alone. */
#pragma once

#include <kvant/calibration.h>

#include "codec_internal.h"

/* The calibration's entry for this place and role; what names what is wanted of it.
 * KVANT_ERR_UNSUPPORTED without a calibration, KVANT_ERR_ARGUMENT when it was made for another
 * shape of model. */
kvant_status kvant_site_entry(const kvant_codec *codec, const kvant_site *site, kvant_role role,
                              const char *what, kvant_calibration_entry *entry,
                              const kvant_error *error);

/* Gives the codec what center=file and norm=file in its spec ask for: file_center is the mean,
 * file_scale is sqrt(max |x - centre|) of every channel, as InnerQ section 4.3 defines it, but at
 * least 1/256 of the largest, as kvant/cache.h says for norm=first. */
kvant_status kvant_site_fill(kvant_codec *codec, const kvant_site *site, const kvant_error *error);

/* Applies the option transform=: for keys, puts the calibration's W before the rotation:
 * transform=file the matrix, transform=diagonal the factors. Names them in the canonical spec,
 * presets center=file (of values that is all) and drops the family's own norm. transform=first
 * presets center=first and norm=first and leaves the rest to the cache. Errors as kvant_site_entry;
 * KVANT_ERR_SPEC beside norm=; KVANT_ERR_FORMAT when the matrix has no good inverse. */
kvant_status kvant_site_weigh(kvant_codec *codec, const kvant_common *common,
                              const kvant_site *site, const kvant_error *error);
