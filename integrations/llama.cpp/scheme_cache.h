/* scheme_cache.h - schemes that contexts share: contexts with equal settings share their codecs.
 *
 * When a file changes, the next context gets a new scheme beside the old scheme. Schemes live as
 * long as the process. */
#ifndef KVP_SCHEME_CACHE_H
#define KVP_SCHEME_CACHE_H

#include <kvant/scheme.h>

/* The scheme of these parameters; NULL, with the reason in kvant_error_message(). Thread-safe. */
kvant_scheme *kvp_scheme_get(const kvant_scheme_params *params);

#endif /* KVP_SCHEME_CACHE_H */
