/* cmd_plugin_path.c - `kvant plugin-path`, for scripts that set GGML_BACKEND_PATH and start
 * llama.cpp themselves. */
#include "args.h"
#include "command.h"
#include "os.h"
#include "plugin.h"

#include <stdio.h>

static const arg_spec spec = {
    .command = "plugin-path",
    .usage = "",
    .about = "Prints the absolute path of libggml-kvant.so.",
    .notes =
        "If llama.cpp lists a GPU that is not CUDA's, leave --device and -ngl out: the GPU then "
        "holds\n"
        "the weights. With --device KVANT they stay on the CPU.\n\nexample:\n"
        "  GGML_BACKEND_PATH=$(kvant plugin-path) KVANT_PRESET=balanced \\\n"
        "    llama-server -m model.gguf --device KVANT -ngl 99 -fa on",
};

int command_plugin_path(int argc, char **argv)
{
    char path[OS_MAX_PATH];
    const int code = args_parse_all(&spec, argc, argv, NULL);
    if (code >= 0)
        return code;
    if (!plugin_path(path, sizeof path))
        return EXIT_RUNTIME;
    puts(path);
    return finish_output();
}
