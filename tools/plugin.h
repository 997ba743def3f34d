/* plugin.h - the path of libggml-kvant.so, and the environment with its settings. */
#pragma once

#include <kvant/scheme.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PLUGIN_DEVICE "KVANT"      /* the device's name, and the back-end registry's */
#define PLUGIN_ACCEL "KVANT_ACCEL" /* the device of --accel, and the variable that requests it */
#define PLUGIN_ENV_K "KVANT_K" /* codec spec of keys, read when a context's cache is allocated */
#define PLUGIN_ENV_V "KVANT_V"
#define PLUGIN_ENV_PRESET "KVANT_PRESET"
#define PLUGIN_ENV_CONFIG "KVANT_CONFIG"
#define PLUGIN_ENV_PROTECT "KVANT_PROTECT"
#define PLUGIN_ENV_PROTECT_CODEC "KVANT_PROTECT_CODEC"
#define PLUGIN_ENV_CALIBRATION "KVANT_CALIBRATION"
#define PLUGIN_ENV_FP32 "KVANT_FP32"
#define PLUGIN_ENV_CPU "KVANT_CPU"
#define PLUGIN_ENV_QUIET "KVANT_QUIET"
#define PLUGIN_ENV_VERBOSE "KVANT_VERBOSE"
#define PLUGIN_ENV_EXACT "KVANT_EXACT"   /* the most tokens that a cache keeps as f16 itself */
#define PLUGIN_ENV_STATES "KVANT_STATES" /* what saved states hold */
#define PLUGIN_ENV_WATCH "KVANT_WATCH"   /* set by exec: the socket that the plug-in reports to */
#define PLUGIN_ENV_BACKEND "KVANT_BACKEND_PATH" /* a back end that the plug-in loads first */
#define PLUGIN_ENV_PATH "KVANT_PLUGIN"          /* overrides where the plug-in is looked for */

/* The absolute path of the plug-in. False after complaining where it was looked for. */
bool plugin_path(char *path, size_t bytes);

/* A fingerprint of the plug-in's file, because another build may round differently; 0 when there is
 * no plug-in. */
uint64_t plugin_fingerprint(void);

/* The absolute path of one of kvant's libraries, looked for where the build folder and an
 * installation have them. False when it is not there. */
bool library_beside_command(const char *file, char *path, size_t bytes);

/* The absolute path of the folder with kvant's Python package and its data; false when there is
 * none. */
bool data_beside_command(char *path, size_t bytes);

#define PLUGIN_MAX_PROTECT 1000u
#define PLUGIN_PROTECT_CODEC "f16" /* of protected layers, unless told otherwise */

/* Sets the environment variables of this process to a scheme that was made from params. With NULL
 * it sets them to no choice of codecs. False after complaining. */
bool plugin_set(const kvant_scheme_params *params, const kvant_scheme *scheme, bool fp32);

/* Sets how long OpenMP's threads spin at a barrier, unless the user has set it. The library libgomp
 * reads the variable when it is loaded, so call this before llama.cpp's libraries are loaded or
 * another program is started. False after complaining. */
bool plugin_limit_spinning(void);
