/* python_command.c - starts commands that are written in Python
 * (integrations/python/kvant/commands): the process becomes the interpreter.
 *
 * Owns where interpreter and package are, and which variables tell the package of this program.
 * Parses no options: the package does. */
#include "command.h"
#include "os.h"
#include "plugin.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ENV_PYTHON "KVANT_PYTHON"   /* the interpreter, instead of OS_PYTHON */
#define ENV_COMMAND "KVANT_COMMAND" /* this program, which Python commands start again */
#define ENV_DATA "KVANT_DATA"       /* the folder with the package and its data */
#define ENV_RUNTIME "KVANT_RUNTIME" /* llama.cpp's libraries, for commands that call them */
#define ENV_LIBRARY "KVANT_LIBRARY" /* libkvant, for commands that call it */

static bool set_package_variables(const char *data)
{
    char command[OS_MAX_PATH], library[OS_MAX_PATH];
    if (!os_own_path(command, sizeof command))
        return false;
#ifdef KVANT_HAVE_LLAMA
    const char *runtime = getenv(ENV_RUNTIME);
    if ((runtime == NULL || runtime[0] == 0) &&
        !os_set_variable(ENV_RUNTIME, KVANT_DEFAULT_RUNTIME))
        return false;
#endif
    return os_set_variable(ENV_COMMAND, command) && os_set_variable(ENV_DATA, data) &&
           (!library_beside_command(OS_LIBKVANT, library, sizeof library) ||
            os_set_default(ENV_LIBRARY, library));
}

/* argv[0], the subcommand, names the package's module. */
static void become(const char *python, const char *package, int argc, char **argv)
{
    char **words = calloc((size_t)argc + 3, sizeof *words);
    if (words == NULL)
        return;
    words[0] = program_argument(python);
    words[1] = program_argument(package);
    memcpy(words + 2, argv, (size_t)argc * sizeof *words);
    os_become(words);
    free(words);
}

/* An installation has the package next to its data; a wheel has both inside the package
 * (cmake/wheel.cmake). */
static bool find_package(const char *data, char *package, size_t bytes)
{
    static const char *const places[] = { "python/kvant", "../.." };
    for (size_t i = 0; i < 2; i++) {
        snprintf(package, bytes, "%s/%s/commands", data, places[i]);
        if (kvant_os_exists(package))
            return true;
    }
    return false;
}

int python_command(int argc, char **argv)
{
    const char *given = getenv(ENV_PYTHON),
               *python = given != NULL && given[0] != 0 ? given : OS_PYTHON;
    char data[OS_MAX_PATH] = "", package[OS_MAX_PATH + 32];
    if (!data_beside_command(data, sizeof data) || !find_package(data, package, sizeof package)) {
        complain("%s: the Python part of kvant is missing: it is not in ../share/kvant/python next "
                 "to the program",
                 argv[0]);
        hint("install the whole of kvant: cmake --install, or make install");
        return EXIT_RUNTIME;
    }
    if (set_package_variables(data))
        become(python, package, argc, argv);
    complain("%s: cannot start %s: %s", argv[0], python, strerror(errno));
    hint("this command needs Python 3.9 or newer; " ENV_PYTHON " names the interpreter");
    return EXIT_RUNTIME;
}
