#include "holdfast/coord/decision.h"

#include "holdfast/coord/incident.pb.h"

namespace holdfast {

namespace {

void encode(const EvidenceOrder& order, DecisionMessage::Evidence* to) {
  to->mutable_ranks()->Assign(order.ranks.begin(), order.ranks.end());
  to->set_full(order.full);
  to->set_from_all(order.from_all);
  to->set_bytes(order.bytes);
  to->set_state_bytes(order.state_bytes);
  to->set_stage(static_cast<int>(order.stage));
  to->set_tensor(order.tensor);
  to->set_index(order.index);
  to->set_micro_batch(order.micro_batch);
  to->set_of_update(order.of_update);
  to->set_examined(order.examined);
  to->set_examiner(order.examiner);
  to->set_examined_bytes(order.examined_bytes);
}

EvidenceOrder decoded(const DecisionMessage::Evidence& from) {
  EvidenceOrder order;
  order.ranks.assign(from.ranks().begin(), from.ranks().end());
  order.full = from.full();
  order.from_all = from.from_all();
  order.bytes = from.bytes();
  order.state_bytes = from.state_bytes();
  order.stage = static_cast<Stage>(from.stage());
  order.tensor = from.tensor();
  order.index = from.index();
  order.micro_batch = from.micro_batch();
  order.of_update = from.of_update();
  order.examined = from.examined();
  order.examiner = from.examiner();
  order.examined_bytes = from.examined_bytes();
  return order;
}

}  // namespace

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
  if (decision.back_to) {
    message.set_generation_epoch(decision.back_to->epoch);
    message.set_generation_attempt(decision.back_to->attempt);
  }
  if (decision.evidence) encode(*decision.evidence, message.mutable_evidence());
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
  decision->evidence.reset();
  decision->back_to.reset();
  if (message.has_generation_epoch() && message.has_generation_attempt()) {
    decision->back_to = GenerationId{message.generation_epoch(), message.generation_attempt()};
  }
  if (!message.has_evidence()) return true;
  if (message.evidence().stage() < 0 || message.evidence().stage() >= kStageCount) return false;
  decision->evidence = decoded(message.evidence());
  return true;
}

}  // namespace holdfast
