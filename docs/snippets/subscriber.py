from headrace.consumers import Events
from headrace.schemas.events import StepCompleted

events = Events()


@events.subscriber(StepCompleted)
async def on_step(step: StepCompleted) -> None:
    print(step.model_id, step.policy_version, step.metrics)


if __name__ == "__main__":
    events.run()
