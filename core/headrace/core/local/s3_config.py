"""The configuration of the local S3 server: S3Proxy over a folder."""

from pathlib import Path

from headrace.core.local.ports import HOST

JVM_OPTIONS = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true")
"""125 MB resident after a start, 310 MB after multipart uploads."""

LOGBACK = """\
<configuration>
  <statusListener class="ch.qos.logback.core.status.NopStatusListener"/>
  <appender name="file" class="ch.qos.logback.core.rolling.RollingFileAppender">
    <file>{log}</file>
    <rollingPolicy class="ch.qos.logback.core.rolling.FixedWindowRollingPolicy">
      <fileNamePattern>{log}.%i</fileNamePattern>
      <maxIndex>3</maxIndex>
    </rollingPolicy>
    <triggeringPolicy class="ch.qos.logback.core.rolling.SizeBasedTriggeringPolicy"><maxFileSize>10MB</maxFileSize></triggeringPolicy>
    <encoder><pattern>%d %-5level %msg \\(%logger{{20}}\\)%n</pattern></encoder>
  </appender>
  <root level="warn"><appender-ref ref="file"/></root>
</configuration>
"""
"""At debug, logback's own default, the server is several times slower."""


def s3proxy_properties(*, data: Path, port: int, access_key: str, secret_key: str) -> str:
    """The text of `s3proxy.properties`; it holds the secret."""
    settings = {
        "s3proxy.endpoint": f"http://{HOST}:{port}",
        "s3proxy.authorization": "aws-v2-or-v4",
        "s3proxy.identity": access_key,
        "s3proxy.credential": secret_key,
        "jclouds.provider": "filesystem-nio2",
        "jclouds.filesystem.basedir": str(data),
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())
