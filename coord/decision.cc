#include "holdfast/coord/decision.h"

#include "holdfast/coord/incident.pb.h"

namespace holdfast {

std::string_view action_name(Action action) {
  switch (action) {
    case Action::kApply: return "APPLY";
    case Action::kSkip: return "SKIP";
    case Action::kRollBack: return "ROLL_BACK";
    case Action::kAbort: return "ABORT";
    case Action::kStop: return "STOP";
  }
  return "UNKNOWN";
}

std::string encode_decision(const Decision& decision) {
  DecisionMessage message;
  message.set_action(static_cast<int>(decision.action));
  message.set_exit_code(decision.exit_code());
  message.set_reason(decision.reason);
  return message.SerializeAsString();
}

bool decode_decision(const std::string& bytes, Decision* decision) {
  DecisionMessage message;
  if (!message.ParseFromString(bytes) || !message.has_action()) return false;
  if (message.action() < 0 || message.action() > static_cast<int>(Action::kStop)) return false;
  // A run that was cut must never look like a success, whatever the shell makes of a code.
  const bool ends_run = message.action() >= static_cast<int>(Action::kAbort);
  const bool known = status_code_name(static_cast<StatusCode>(message.exit_code())) != "UNKNOWN";
  if (!known || ends_run != (message.exit_code() != 0)) return false;
  decision->action = static_cast<Action>(message.action());
  decision->code = static_cast<StatusCode>(message.exit_code());
  decision->reason = message.reason();
  return true;
}

}  // namespace holdfast
