#include <cstdio>
#include <memory>
#include <string>

#include "cli/commands.h"

namespace holdfast::cli {
namespace {

constexpr const char* kFooter = R"(
Example, for this shell or in ~/.bashrc:
  source <(holdfast completion bash)
Exit codes: 0 printed   64 usage)";

// The words that may follow a command: its subcommands and options.
std::string words(const CLI::App& app) {
  std::string text;
  for (const CLI::App* command : app.get_subcommands({})) text += command->get_name() + " ";
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) text += "--" + name + " ";
  }
  if (!text.empty()) text.pop_back();
  return text;
}

void print_cases(const CLI::App& app, const std::string& path) {
  for (const CLI::App* command : app.get_subcommands({})) {
    const std::string name = path.empty() ? command->get_name() : path + " " + command->get_name();
    print_cases(*command, name);
    std::printf("    \"%s\"*) words=\"%s\" ;;\n", name.c_str(), words(*command).c_str());
  }
}

void print_bash(const CLI::App& app) {
  std::printf(
      "_holdfast() {\n"
      "  local current=${COMP_WORDS[COMP_CWORD]} words\n"
      "  case \"${COMP_WORDS[*]:1:COMP_CWORD-1}\" in\n");
  print_cases(app, "");
  std::printf(
      "    *) words=\"%s\" ;;\n"
      "  esac\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
      "}\n"
      "complete -o default -F _holdfast holdfast\n",
      words(app).c_str());
}

}  // namespace

void add_completion(CLI::App* app, Outcome*) {
  CLI::App* command =
      app->add_subcommand("completion", "Print a script that completes this command's words.");
  command->footer(kFooter);
  const auto shell = std::make_shared<std::string>();
  command->add_option("SHELL", *shell, "bash")->required()->check(CLI::IsMember({"bash"}));
  command->callback([app, shell] { print_bash(*app); });
}

}  // namespace holdfast::cli
