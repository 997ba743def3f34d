/* file_cache.h - calibrations and settings files that were loaded, kept as long as the process lives: settings are read for every
 * tensor, and codecs point into calibrations. A file that changed is loaded again beside the old one. */
#ifndef KVP_FILE_CACHE_H
#define KVP_FILE_CACHE_H

#include <kvant/calibration.h>
#include <kvant/settings.h>

/* The contents of a file, or NULL with one line in err. Thread-safe. */
const kvant_calibration *kvp_calibration_get(const char *path, char *err, size_t errlen);
const kvant_settings *kvp_config_get(const char *path, char *err, size_t errlen);

#endif /* KVP_FILE_CACHE_H */
